"""Every test sees 8 emulated CPU devices; compiled programs are kept between runs."""

import os
import tempfile
from pathlib import Path

import jax

import jaxpar

jaxpar.emulate_devices(8)
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAXPAR_TEST_CACHE") or str(
    Path(tempfile.gettempdir()) / f"jaxpar-test-cache-{jax.__version__}"))  # fmt: skip
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
