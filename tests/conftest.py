"""Every test sees 8 emulated CPU devices; compiled programs are kept between runs.

XLA optimises the HLO as always and spends half the time on machine code, which tests run once.
"""

import os
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax  # noqa: E402

import jaxpar  # noqa: E402

jaxpar.emulate_devices(8)
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAXPAR_TEST_CACHE") or str(
    Path(tempfile.gettempdir()) / f"jaxpar-test-cache-{jax.__version__}"))  # fmt: skip
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
