"""The verb `explain`: what one engine of a scenario can do, and what bounds it. See docs/explain.md."""
