"""`servecast plan`: the cheapest deployment that meets its requirements at the given traffic, and how sure that is."""
