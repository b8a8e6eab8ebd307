"""A measured run replayed and compared: `servecast validate`."""
