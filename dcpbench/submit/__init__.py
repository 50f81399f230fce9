"""Submit a run to a cluster, as a job of Slurm or Kubernetes, and follow it to its end. No torch.

RUN/submit/job.json      Submitted: job and content, with which other commands follow and cancel it
RUN/submit/job.sh, .yaml submitted script or manifest, without its secret
RUN/submit/ID.log        output of a Slurm job; ID.code: the exit code of its command
RUN/nodes/K              logs of machine K; the records are in RUN itself
"""
