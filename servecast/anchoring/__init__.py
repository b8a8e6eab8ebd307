"""A few of the host's times fitted to measured runs or steps: `servecast calibrate anchor`."""
