"""`servecast compare`: the same requests under several scenarios; which is better, by more than chance, and why."""
