"""The compiled parts; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Without a C compiler the planner searches in Python and says so.
        Extension(
            "tvmx.memory._core",
            [
                "tvmx/memory/core_module.c",
                "tvmx/memory/core_place.c",
                "tvmx/memory/core_search.c",
                "tvmx/memory/core_stack.c",
                "tvmx/memory/core_eject.c",
                "tvmx/memory/core_skyline.c",
            ],
            depends=["tvmx/memory/core.h"],
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
