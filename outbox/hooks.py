"""Where parts join the core. The core reads this file and never names a part; a part adds to it and changes no core.

A part is a folder with an app of Django. A project turns the part on by naming the app in INSTALLED_APPS, and the app's
`ready` calls the functions below, or its module does where a function says so:

    class GreetingsConfig(AppConfig):
        name = "shop.greetings"

        def ready(self) -> None:
            hooks.add_pass("greetings", 60.0, "shop.greetings.sending.send")

What a part wants to do, and how:

    change messages that are published          Option (those with the option), add_body_step (all: bodies, headers)
    read bodies of its own form                 add_body_form
    let projects declare types of messages      add_message_types
    decide when a message starts, or which      add_admission, add_lane
    wrap handlers                               add_handler_wrapper
    work at intervals                           add_pass; in the leader: add_leader_work
    have processes of its own                   add_role
    do something before messages are consumed   add_preparation
    have settings, fault points                 add_settings, add_fault_points
    have tables of an application               add_tables, add_pruning (old rows), add_own_database
    have tables of the broker                   add_schema, add_subscription_rows (rows that go with subscriptions)
    show operators what is wrong                add_conditions, add_waits, add_result_report
    let operators act and list                  add_actions
    serve figures and files                     add_metrics, add_served, add_shared_folder
    remove data of a person                     add_tables, add_schema, add_removal, add_list, add_deleted_keys
    be another broker                           add_engine

Code is named by its dotted path and imported when it is first called, so a web process imports nothing of what only
workers, commands and pages run. A name that is added again replaces its earlier entry, because Django calls `ready`
again if a test changes INSTALLED_APPS. Without parts, every collection below is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self
from uuid import UUID

from outbox.utils.ids import uuid7

if TYPE_CHECKING:
    from outbox.message import Message

# -- periodic passes -------------------------------------------------------------------------------


class Pass(NamedTuple):
    """A periodic pass: its interval in seconds, and the dotted path of its function `() -> counts`."""

    interval_seconds: float
    work: str
    in_every_process: bool = False


passes: Final[dict[str, Pass]] = {}


def add_pass(name: str, interval_seconds: float, work: str, *, in_every_process: bool = False) -> None:
    """Run the function at the dotted path `work` as a periodic pass of the service.

    The role `check` of a worker, or Celery beat, calls the function at the interval, in one process at a time and
    outside of any transaction. It returns counts for the log; with a true count `more` it runs again at once. An error
    is logged, becomes the condition `process_failing`, and stops no other pass.

    With `in_every_process`, each process calls it, for example to store what its version of the code declares.
    """
    passes[name] = Pass(interval_seconds, work, in_every_process)


# -- subscriptions ---------------------------------------------------------------------------------

# The class of an option of subscriptions -> the dotted path of a class like `Admission`.
admissions: Final[dict[type, str]] = {}


def add_admission(option: type, kind: str) -> None:
    """Let a part decide when the calls of a subscription start that has an option of this class.

    `kind` is the dotted path of a class with the methods of `Admission` (broker/consumer/subscription_runner.py). A
    consumer process makes one object per subscription with such an option, and calls it in the dispatching thread.
    After a psycopg.Error this thread connects anew and repeats its step; another error ends the process. A subscription
    has one such option at most.
    """
    admissions[option] = kind


# The class of an option of subscriptions -> the dotted path of a class like `Lane`.
lanes: Final[dict[type, str]] = {}


def add_lane(option: type, kind: str) -> None:
    """Let a part decide which message is next, for subscriptions with an option of this class whose `has_lane` is true.

    `kind` is the dotted path of a class with the methods of `Lane` (outbox/broker/consumer/lanes.py), such as a
    subclass of `RoundRobinLane` in the same file. A consumer process calls it with the option once per subscription in
    concurrent mode, and uses the object in the dispatching thread. An error of it ends the process. A subscription has
    one such option at most, and may have an admission beside it.
    """
    lanes[option] = kind


# The class of an option of subscriptions -> the dotted path of a class like `ResultReport`.
result_reports: Final[dict[type, str]] = {}


def add_result_report(option: type, kind: str) -> None:
    """Let a part tell operators what the results of calls mean, for subscriptions with an option of this class.

    `kind` is the dotted path of a class with the methods of `ResultReport` (broker/consumer/subscription_runner.py). A
    consumer process makes one object per subscription with such an option, and calls it in the dispatching thread, on a
    connection of the broker in autocommit mode. After a psycopg.Error this thread connects anew and repeats its step;
    another error ends the process.
    """
    result_reports[option] = kind


# The class of an option of subscriptions -> the dotted path of the function that wraps their handlers.
handler_wrappers: Final[dict[type, str]] = {}


def add_handler_wrapper(option: type, wrap: str) -> None:
    """Let a part wrap the handler of each subscription that has an option of this class.

    The function at the dotted path `wrap`, `(option, subscription, handler) -> handler`, is called when a process
    begins to consume. What it returns is called in place of the handler and its middleware, in the transaction of the
    message and after its inbox row is written. An error of it is an error of the handler.
    """
    handler_wrappers[option] = wrap


class SubscriptionRows(NamedTuple):
    """The dotted paths of the functions of a part that has rows about subscriptions in the broker's database."""

    deleted: str
    process_ended: str
    expired: str
    registered: str | None = None


subscription_rows: Final[dict[str, SubscriptionRows]] = {}


def add_subscription_rows(
    name: str, *, deleted: str, process_ended: str, expired: str, registered: str | None = None
) -> None:
    """Keep rows of a part about subscriptions in step with subscriptions and consumer processes.

    `registered(run, key, subscription)`: a process has registered the subscription, whose key is (group id, topic id).
    `deleted(run, key)`: an operator deletes the subscription. `process_ended(run, instance)`: a consumer process has
    ended, or a supervisor has recorded its death. All three are called in the transaction of the event, if it has one,
    and an error undoes the event. `expired(run)`: remove what processes have left behind that died unseen; called when
    a consumer process starts.
    """
    subscription_rows[name] = SubscriptionRows(deleted, process_ended, expired, registered)


waits: Final[dict[str, None]] = {}


def add_waits(work: str) -> None:
    """Tell operators what the messages of a subscription wait for in the memory of the consumer processes.

    The function at the dotted path, `(run) -> {(group, topic): facts}`, names the subscriptions whose messages wait.
    Its facts are added to the evidence of `lag` and `group_paused`; one of them is `waiting_for`. It is called on a
    connection of the broker in autocommit mode, and an error means that the broker cannot be read.
    """
    waits[work] = None


# -- conditions ------------------------------------------------------------------------------------

# Modules with declarations of the name CONDITIONS, in the order in which they were added.
broker_conditions: Final[dict[str, None]] = {}
application_conditions: Final[dict[str, None]] = {}


def add_conditions(module: str, *, of_broker: bool = False) -> None:
    """Show the conditions that a module declares in `CONDITIONS` (outbox/broker/operations/conditions.py).

    Status, page, metrics and probe call the rules, on a connection of the broker in autocommit mode. With `of_broker`
    the rules read only the broker's tables, and an error of one means that the broker cannot be read. Without it, the
    rules may read tables of the application, and an error means that it is unknown whether this condition holds.
    """
    (broker_conditions if of_broker else application_conditions)[module] = None


# -- actions and listings --------------------------------------------------------------------------

actions: Final[dict[str, None]] = {}


def add_actions(module: str) -> None:
    """Offer the actions and listings that a module declares (outbox/contrib/django/actions/declaration.py).

    Each becomes a command with its arguments, a page or button, JSON, and a row of the audit. A command that no part
    of the core has is a class in the part's `management/commands`, as in every app of Django.
    """
    actions[module] = None


# -- metrics ---------------------------------------------------------------------------------------

metrics: Final[dict[str, None]] = {}


def add_metrics(module: str) -> None:
    """Serve gauges that a module declares in `METRICS`: name -> (labels, text).

    Its function `figures(state) -> (name, rows) pairs` is called at a scrape, on a connection of the broker in
    autocommit mode (`BrokerState`). A row has the values of the labels and the value. An error fails the scrape.
    """
    metrics[module] = None


# -- settings --------------------------------------------------------------------------------------

settings: Final[dict[str, type]] = {}


def add_settings(kind: type) -> None:
    """Let the keys of OUTBOX also be those of a dataclass, whose fields are made by `setting` of
    outbox/contrib/django/settings/definition.py. `outbox.contrib.django.settings.conf.settings_of(kind)` returns them.

    A part calls this in the module of its AppConfig, not in `ready`, because the core reads the settings in its own
    `ready`, which may be called first. The dataclass is in the part's module `settings`.
    """
    settings[f"{kind.__module__}.{kind.__qualname__}"] = kind


# -- tables of the application's databases ---------------------------------------------------------

Rights = Mapping[str, Mapping[str, Sequence[str]]]


class Tables(NamedTuple):
    """The tables of an app: what publishers may do with them, and which of them can hold data about a person.

    `rights`: table -> right -> columns (none: all). The roles `work` and `watch` get their rights on every table.
    `content`: name of each model -> dotted path of the function that removes a person's data from its rows, or None if
    the rows have only ids, hashes and times.
    """

    rights: Rights
    content: Mapping[str, str | None]


tables: Final[dict[str, Tables]] = {}


def add_tables(app_label: str, *, rights: Rights | None = None, content: Mapping[str, str | None]) -> None:
    """Name what happens to the tables of an app's models: who may use them, and how a person's data leaves them.

    The functions in `content`, `(rows, scope) -> number of changed rows`, are called in one transaction for all tables
    of a database. An error of one rolls this transaction back.
    """
    tables[app_label] = Tables(rights or {}, content)


# -- processes of a worker -------------------------------------------------------------------------

# Path at HEALTH_ADDRESS -> the dotted path of the function that answers it.
served: Final[dict[str, str]] = {}


def add_served(path: str, answer: str) -> None:
    """Let a worker answer `path` at OUTBOX['HEALTH_ADDRESS'] with the function at the dotted path `answer`.

    The function `() -> (type of the content, content)` is called in a thread of its own for each request with the
    token, or from this machine if the settings have no token. Its database connections are closed afterwards. After an
    error the client gets no answer, and the error is written to the log.
    """
    served[path] = answer


# Name of an environment variable -> the folder below HEALTH_DIRECTORY.
shared_folders: Final[dict[str, str]] = {}


def add_shared_folder(variable: str, folder: str) -> None:
    """Give the processes of a worker a folder, in which they leave files for the process that answers its requests.

    Before the worker starts its processes, it makes the folder in OUTBOX['HEALTH_DIRECTORY'], and removes the files of
    an earlier worker. The environment variable has the path; without HEALTH_DIRECTORY, there is neither.
    """
    shared_folders[variable] = folder


# -- pruning ---------------------------------------------------------------------------------------

# Table -> the dotted path of the function that removes its rows.
prunings: Final[dict[str, str]] = {}


def add_pruning(table: str, work: str) -> None:
    """Remove rows of a part's table with each pass of pruning, on every alias that has a ledger.

    The function at the dotted path `work`, `(connection, *, limit) -> number of removed rows`, gets a connection of its
    own in autocommit mode. If it removes `limit` rows, it is called again while there is time. If it raises
    django.db.DatabaseError, the other tables and aliases are pruned, and then the pass fails.
    """
    prunings[table] = work


# -- before messages are consumed ------------------------------------------------------------------

# What is done -> the dotted path of the function that does it.
preparations: Final[dict[str, str]] = {}


def add_preparation(what: str, work: str) -> None:
    """Let the function at the dotted path `work`, `() -> None`, finish before a process handles or forwards messages.

    Each consumer process and each forwarding process calls it once, outside of any transaction. After
    ServiceUnavailable, BrokerUnavailable, or django.db.OperationalError the process stays alive, is not ready, logs
    that `what` failed, and calls the function again. Another error ends the process.
    """
    preparations[what] = work


# -- roles of worker processes ---------------------------------------------------------------------


class Role(NamedTuple):
    """A role of worker processes. Its functions are named by their dotted paths.

    `help`: what the role does, for `outbox_worker --help`.
    `run`: the function `(stop, names) -> None`.
    `drain`: the function `(names) -> text` of `outbox_worker --drain`. Without it, the role has no such work.
    `option`: the name of the option of `outbox_worker` that restricts the role to `names`: `group` or one of its own.
    `is_needed`: the function `() -> bool`. Without it, only a worker that is given the role starts a process for it.
    `groups`: the function `() -> {group: {topic: is_start_given}}` about the consumer groups that the role serves.
    """

    help: str
    run: str
    drain: str | None = None
    option: str | None = None
    is_needed: str | None = None
    groups: str | None = None


roles: Final[dict[str, Role]] = {}


def add_role(name: str, role: Role) -> None:
    """Let workers have processes with a role of this name.

    `run` gets the names that the option has restricted the role to (none: all), works until the event `stop` is set,
    and writes heartbeats (`outbox.utils.heartbeat`). An error ends the process, and its supervisor starts it again.
    `is_needed` is called once before `outbox_worker` or a worker of Celery starts its processes.

    `drain` does the work that is due now, in the process of the command, and returns what the command says. `groups` is
    called by `check` and by workers when they start: they warn of a group that is new to a topic, without a start.
    """
    roles[name] = role


# -- tables of the broker --------------------------------------------------------------------------

# Name of a part -> the package with its files of SQL.
schemas: Final[dict[str, str]] = {}
# Table of a part -> the dotted path of the function that removes a person's data from it.
broker_content: Final[dict[str, str]] = {}


def add_schema(part: str, package: str, *, content: Mapping[str, str] | None = None) -> None:
    """Install the SQL files of a package in the broker's schema, after the core's: current.sql, functions/*.sql, and
    from the second version on changes/NNNN_*.sql.

    They have the same forms as those of the core (outbox/broker/schema/install.py): search_path is the schema, and the
    first comment `-- Locks: …` names the existing tables that a file locks, such as those that a new table refers to.
    Each file is one transaction; an error of one rolls it back, and `migrate` reports it. A change with which code of
    the version before cannot work does `UPDATE schema_version SET minimum_code = N WHERE name = …`, and so does
    current.sql.

    Every new table is for the roles `work` and `watch`, and none for publishers. Functions run with the rights of the
    caller. A process with the part refuses a broker that lacks these tables.

    `content` names the tables that can hold data about a person, with the function that removes it from their rows:
    `(run, values) -> number of changed rows`. It is called in the transaction that removes the content of messages of a
    topic, while the log still has the content, and an error rolls this back. `values` has their `log_ids`,
    `transaction_ids` and `topic_id`, the `replacement` of their keys or None, and `patterns` (SQL's LIKE) of texts that
    are removed wherever they are.

    Retention knows nothing of these tables. Their old rows go by a reference to the core's rows (ON DELETE CASCADE), by
    `add_subscription_rows`, or by work of the part (`add_leader_work`, `add_pass`).

    The broker's database records the part. Other services on it may lack the part, and may have parts that this one
    lacks.
    """
    schemas[part] = package
    broker_content.update(content or {})


# -- work of the leader ----------------------------------------------------------------------------

# Name of a part with tables of the broker -> the dotted path of the class that does its work.
leader_work: Final[dict[str, str]] = {}


def add_leader_work(part: str, work: str) -> None:
    """Let the leader do work of a part, with an object of the class at the dotted path `work`.

    The class is called with the database of the broker whenever this process begins to lead. Its objects are
    `outbox.broker.leading.PartWork`: `look` is called between ticks, on the leader's connection in autocommit mode, so
    it only looks whether something is due; `loop` works in a thread. An error of `look` ends the lead of this process
    for a while.

    A process that lacks the part leads only while no process with it does (the condition `part_missing`).
    """
    leader_work[part] = work


# -- engines ---------------------------------------------------------------------------------------


class Engine(NamedTuple):
    """An engine for the addresses of one scheme, as dotted paths.

    `kind`: a subclass of `Engine` of outbox/contrib/django/engine/engine.py.
    `observer`: the module through which operators see and change the engine's server; its members are those of
    `Observer` in outbox/contrib/django/operations/known_conditions.py.
    """

    kind: str
    observer: str


engines: Final[dict[str, Engine]] = {}


def add_engine(scheme: str, engine: Engine) -> None:
    """Let OUTBOX['BROKER'] be an address `scheme://…` of a broker of this engine.

    The class says what an engine decides: its broker and consumers (outbox/ports.py), what it refuses, its passes, and
    what `publish` stores beside half messages. A process makes one object of it when it first publishes or consumes.
    Only commands, pages, probes and metrics import the observer; each of its functions says what an error does.

    A part calls this in the module of its AppConfig, like `add_settings`.
    """
    engines[scheme] = engine


# -- fault points ----------------------------------------------------------------------------------

fault_points: Final[dict[str, None]] = {}


def add_fault_points(*names: str) -> None:
    """Let OUTBOX_FAULTS also name these places of a part's code, which call `point` of outbox/utils/faults.py.

    A part calls this in the module of its AppConfig, like `add_settings`.
    """
    fault_points.update(dict.fromkeys(names))


# -- messages that are published -------------------------------------------------------------------


@dataclass(slots=True)
class Draft:
    """A message that is being built: its encoded body, which a part may replace, with its content type and headers.

    `headers`: as the caller passed them, not checked yet. `when_valid`: what to do as soon as the message has passed
    all checks, and before it is published.
    """

    topic: str
    body: bytes
    content_type: str
    headers: Mapping[str, str] | None = None
    message_id: UUID = field(default_factory=uuid7)
    when_valid: list[Callable[[], None]] = field(default_factory=list)


class Option:
    """An argument of `publish` that a part understands. The core passes it on and does not know its class.

    publish("order.paid", {"id": order.pk}, Subject(order.customer_id))

    `encode` is called in the order of the arguments, after the topic's codec has encoded the body. No transaction needs
    to be open yet. An error refuses the message: nothing is published, and the block of the caller is rolled back.

    If `is_kept` is true, the message needs a transaction, and `admit` is called before the message is stored in it.
    """

    __slots__ = ()

    is_kept: ClassVar[bool] = False

    def encode(self, draft: Draft) -> None:
        """Change the draft of the message. Raises the errors of `publish`."""

    @classmethod
    def admit(cls, connection: Any, wanted: Sequence[tuple[Message, Self]]) -> Mapping[UUID, UUID]:
        """Return which of the messages are duplicates: the id of each, and the id of the message it is a duplicate of.

        This is called once for all messages of a publish call that have an option of this class, in the caller's
        transaction. The keys of FIFO topics are locked, and nothing of the messages is stored yet. `connection` is
        Django's connection of the transaction, so rows that are written with it commit together with the messages.
        Duplicates are not published. An error refuses all messages of the call, and the caller's block is rolled back.
        """
        return {}


class MessageTypes(NamedTuple):
    """The dotted paths of the functions of a part with which projects declare types of messages.

    `message`: `(value, body, key, tag, headers) -> (topic, body, key, tag, headers)`, for a value that was passed to
    `publish` instead of a topic. `topic`: `(type) -> topic`. `option`: `(annotation, type) -> SubscriptionOption`: what
    reads the bodies for a handler whose parameter has the annotation, or that was registered for the type. Each returns
    None for what the part does not know.

    `advice`: how a project declares a type, for errors.
    """

    message: str
    topic: str
    option: str
    advice: str


message_types: Final[dict[str, MessageTypes]] = {}


def add_message_types(name: str, types: MessageTypes) -> None:
    """Let projects pass values and types that a part knows to `publish`, `transactional_message` and `subscriber`.

    `message` is called by `publish`; no transaction needs to be open yet, and an error refuses the message. `topic` and
    `option` are called by the decorators, and an error is raised there. Modules with models may use the decorators, so
    a part calls this in its package or in the module of its AppConfig, like `add_settings`.
    """
    message_types[name] = types


# Name -> the dotted path of a function that returns what a part does with the body of every message.
body_steps: Final[dict[str, str]] = {}


def add_body_step(name: str, step: str) -> None:
    """Let a part change any message that is published (its encoded body, its headers), after its options did so.

    `step` is the dotted path of a function or class `() -> BodyStep | None` (its base class is in
    outbox/contrib/django/engine/broker.py). It is called when a process first publishes with its settings, and returns
    None if they do not use the step. Its `encode` gets the headers as the caller passed them: an error other than that
    of a wrong value goes to the caller. Messages that are published in SQL, or that another part makes, do not pass
    the step.
    """
    body_steps[name] = step


# -- bodies that are stored in the form of a part ---------------------------------------------------


class ShownBody(NamedTuple):
    """What a page shows instead of a body that it cannot read. `size` (bytes) and `content_type` are of what was
    published, or None if they are unknown."""

    note: str
    size: int | None = None
    content_type: str | None = None


class BodyForm(NamedTuple):
    """The dotted paths of what reads one content type.

    `codec`: a class that is called with the `Codecs` of the process, when it first publishes or consumes. Its objects
    are codecs (`outbox.codec.Codec`). Their `decode` may return an `UnreadBody`, which is read when the handler uses
    it, and may raise HandlerNotStarted: the message then waits, and uses up no attempt.
    `shown`: a function `(body) -> ShownBody` for pages, which do not read such a body.
    """

    codec: str
    shown: str


body_forms: Final[dict[str, BodyForm]] = {}


def add_body_form(content_type: str, form: BodyForm) -> None:
    """Name what reads the bodies of a content type, which begins with `outbox.codec.OWN_CONTENT_TYPES`.

    A process without the part lets messages of such a content type wait.
    """
    body_forms[content_type] = form


# -- content outside of tables ----------------------------------------------------------------------

removals: Final[dict[str, str]] = {}


def add_removal(name: str, remove: str) -> None:
    """Remove also what a part stores about messages outside of any table, such as objects of a storage.

    `remove` is the dotted path of a function `(message_ids, *, dry_run) -> number`. It is called when the data of a
    person is removed, after the changes of all rows are committed, and the number is shown under `name`. An error fails
    this removal, which can be repeated.
    """
    removals[name] = remove


# -- deletions that a restored backup would undo -----------------------------------------------------


class DeletedKeys(NamedTuple):
    """The dotted paths of two functions of a part that has keys: deleting a key makes bodies unreadable for ever.

    `deleted`: `() -> ids`, or None if this process cannot reach the keys. `delete`: `(id) -> whether it was there`.
    """

    deleted: str
    delete: str


deleted_keys: Final[dict[str, DeletedKeys]] = {}


def add_deleted_keys(table: str, keys: DeletedKeys) -> None:
    """Let a list outside of the databases repeat deletions of keys that a restored backup has undone.

    A worker calls the functions before it consumes, outside of any transaction. After an error it does not consume.
    """
    deleted_keys[table] = keys


lists: Final[dict[str, None]] = {}


def add_list(recorder: str) -> None:
    """Record deletions outside of the databases before they are done, so that they can be repeated after a restore.

    `recorder` is the dotted path of a function that returns the function `(kind, id, reason) -> None`, or None if the
    settings do not name a list. An error refuses the deletion.
    """
    lists[recorder] = None


# -- databases of parts --------------------------------------------------------------------------------

own_databases: Final[dict[str, None]] = {}


def add_own_database(alias: str) -> None:
    """Keep the tables of all models out of a database, as out of the broker's: a part creates its tables there.

    `alias` is the dotted path of a function that returns the alias of the database, or None. `BrokerRouter` calls it.
    A part calls this in the module of its AppConfig, like `add_settings`.
    """
    own_databases[alias] = None


# -- the objects at the dotted paths ---------------------------------------------------------------


def resolved(path: str) -> Any:
    """Return the object at a dotted path. Raises ImportError."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@cache
def when_called(path: str) -> Callable[..., Any]:
    """Return a function that imports the function at the dotted path when it is called, and calls it.

    The same path gives the same function, so a registry that is filled twice has it once.
    """

    def call(*args: Any, **options: Any) -> Any:
        return resolved(path)(*args, **options)

    return call
