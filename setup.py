"""Package metadata of tf-teaforn."""

from pathlib import Path

from setuptools import find_packages, setup

COMMANDS = (
    "train",
    "evaluate",
    "decode",
    "score",
    "export",
    "average",
    "build_vocab",
    "prepare",
    "report",
    "sweep",
    "tpu_check",
)

setup(
    name="tf-teaforn",
    version="0.1.0",
    description="TeaForN: teacher-forcing with N-grams for sequence-to-sequence models, on Keras 3",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The tf_teaforn authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    # Keras 3.15 and keras-nlp 0.32 need Python 3.11; TensorFlow 2.21 has nothing for 3.14.
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["tf_teaforn", "tf_teaforn.*", "tasks", "tasks.*"]),
    install_requires=[
        "absl-py>=2.1",
        "babel>=2.14",
        "etils[epath]>=1.9.1",
        # tensorflow-datasets 4.9.10 imports it and asks for it on old Pythons only.
        "importlib_resources>=6",
        "keras>=3.15,<3.16",
        "keras-hub==0.32.*",
        "keras-nlp==0.32.*",
        "matplotlib>=3.9",
        "num2words==0.5.14",
        "numpy>=1.26",
        "portalocker>=2.7",
        "rouge-score>=0.1.2",
        "sacrebleu>=2.4",
        "safetensors>=0.4",
        "scipy>=1.11",
        # Splits documents into sentences: rules, no model to download.
        "sentencex>=1.0.30,<2",
        "sentencepiece>=0.2",
        # tf.summary writes through it, and TensorFlow 2.21 does not require it.
        "tensorboard>=2.20,<2.22",
        "tensorflow>=2.20,<2.22",
        "tensorflow-datasets>=4.9.7",
        "tensorflow-serving-api>=2.20,<2.22",
        # Built against one TensorFlow each: its own requirement keeps the two in step.
        "tensorflow-text>=2.20,<2.22",
        "tqdm>=4.66",
    ],
    extras_require={
        "beam": ["apache-beam>=2.70,<3"],
        "jax": ["jax>=0.10,<0.12"],
        # tensorflow-text asks for the distribution `tensorflow`, whose files those of
        # `tensorflow-tpu` must then replace: docs/distributed.md has the second command.
        "tpu": [
            "tensorflow==2.20.*",
            "tensorflow-text==2.20.*",
            "tensorflow-tpu==2.20.*",
        ],
        # The TPU's compiler, for bin/tpu_check; it needs no TPU.
        "tpu_check": ["jax>=0.10,<0.12", "libtpu==0.0.52; sys_platform == 'linux'"],
        "test": [
            "apache-beam==2.77.0",
            "hypothesis>=6.100",
            "jax==0.10.2",
            "libtpu==0.0.52; sys_platform == 'linux'",
            "packaging>=24",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "ruff>=0.17,<0.18",
            "setuptools>=70.1",
        ],
    },
    entry_points={
        "console_scripts": [f"teaforn-{name} = tf_teaforn.cli.{name}:main" for name in COMMANDS],
    },
)
