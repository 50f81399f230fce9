"""Hang diagnosis: the position of each rank of a job, in files that outlive it, and the ranks that kept the others
waiting. No torch.
"""
