"""What holds for every test: hypothesis has no deadline, as nothing here measures time."""

from hypothesis import settings

settings.register_profile("dcpbench", deadline=None, print_blob=True)
settings.load_profile("dcpbench")
