"""Compare greedy tokens of engines over the same synthetic weights, and decide differences in fp32."""
