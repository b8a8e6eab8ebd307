"""The verb `diagnose`: why a deployment behaves badly, by taking causes away one at a time. See docs/diagnose.md."""
