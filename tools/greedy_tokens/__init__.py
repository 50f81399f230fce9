"""Compare greedy tokens of engines with the same synthetic weights, and judge differences in fp32."""
