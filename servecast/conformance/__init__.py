"""Our scheduler following an engine whose steps were recorded: `servecast calibrate observe` and `check`."""
