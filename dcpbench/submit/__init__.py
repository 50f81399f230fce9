"""A run handed to a cluster: the job of Slurm or Kubernetes that it becomes, followed to its end. No torch.

RUN/submit/job.json      Submitted: which job, of what, so that others can follow and cancel it
RUN/submit/job.sh, .yaml what was submitted, without its secret
RUN/submit/ID.log        what a job of Slurm printed; ID.code: the exit code of its command
RUN/nodes/K              logs of machine K, the records are those of RUN itself
"""
