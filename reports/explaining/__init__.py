"""What `servecast explain` has found, in words, tables and figures."""
