"""Settings of these tests: hypothesis without deadlines, and the modules that tests share."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# pytest imports test modules by path here, which leaves their folder off the search path.
sys.path.insert(0, str(Path(__file__).parent))

# A deadline, and a health check of drawing speed, would fail on a busy machine what is right.
settings.register_profile("zeroshard-core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zeroshard-core")
