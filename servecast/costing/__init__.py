"""What a deployment costs: list prices, the cost of a run, power, and buying, renting or paying per token."""
