"""Who may see what, read off the source: the import rule, the box's inside, and things that have no place in the package."""

import ast
from pathlib import Path

import pytest

import privot

HOME = Path(privot.__file__).parent
FILES = {
    path.relative_to(HOME).as_posix(): ast.parse(path.read_text())
    for path in sorted(HOME.rglob("*.py"))
}

METHODS = (
    "privot.nets",
    "privot.transport",
    "privot.privacy.plan",
    "privot.privacy.sampling",
    "privot.privacy.gate",
    "privot.privacy.protocols.PrivatizedSource",
    "privot.data.spec",
    "privot.components",
    "privot.release.artifact",
    "privot.runtime",
    "privot.errors",
    "privot.local.channels",
    "privot.local.frequency_estimation",
)
# What baselines share; no method may see another one.
SHARED = tuple(
    f"privot.baselines.{Path(name).stem}"
    for name, tree in FILES.items()
    if name.startswith("baselines/")
    and not any("METHOD = " in ast.unparse(each) for each in tree.body)
)
# Networks and transforms that methods share; they see no more than networks do.
AS_NETS = (
    "baselines/kernel_ridge.py",
    "baselines/ntk.py",
    "baselines/zca.py",
    "components/dct.py",
    "components/dead_leaves.py",
    "components/feature_matching.py",
    "components/glyphs.py",
)
NETS = ("privot.nets", "privot.runtime.cuda_graphs", "privot.runtime.kernels", "privot.progress")
ALLOWED = {  # of our own modules; a folder stands for all in it, and the longest name that fits counts
    "transport/": ("privot.transport", "privot.runtime.cuda_graphs", "privot.runtime.kernels"),
    "nets/": NETS,
    "nets/held/": (
        *NETS,
        "privot.errors",
        *(f"privot.{name.removesuffix('.py').replace('/', '.')}" for name in AS_NETS),
    ),
    "local/channels/": (
        "privot.local.channels",
        "privot.transport",
        "privot.privacy.noise",
        "privot.privacy.plan",
        "privot.privacy.sampling",
        "privot.errors",
    ),
    "methods/": (*METHODS, "privot.baselines.condensation"),
    "methods/baselines/": (*METHODS, *SHARED),
    "methods/__init__.py": (*METHODS, "privot.baselines"),
}
# What a method may not reach, beside the gate itself: the parts that the gate is made of.
GATE_PARTS = (
    "privot.privacy.gate",
    "privot.privacy.secret_side",
    "privot.privacy.answers",
    "privot.privacy.shards",
    "privot.privacy.shard_queries",
)
INSIDE = (
    "_read_records",
    "_count_records",
    "_shard_record_indices",
    "_assign_clients",
    "_images",
    "_labels",
    "_client_ids",
)
INSIDERS = (
    "data/",
    "privacy/client_partition.py",
    "privacy/gate.py",
    "privacy/secret_side.py",
    "privacy/shards.py",
    "privacy/shard_queries.py",
    "measures/",
    "attacks/",
    "audit/neighbouring.py",
    "testing/",
    "report/",
)
NAMED_TUPLE = ("_asdict", "_fields", "_make", "_replace")  # public, in spite of their names
PICKLES = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
PICKLERS = (
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "np.load",
    "numpy.load",
)  # numpy's is safe without allow_pickle
SEEDS = (
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "torch.seed",
)
FLOWER = "privot.federated.flower."
QUIET = (
    "methods/",
    "privacy/",
    "local/server_gate.py",
    "runtime/process_group.py",
    "runtime/cuda_graphs.py",
)
LOUD = ("print", "logging", "warnings", "sys.stdout", "sys.stderr", "os.write")
HUSH = "logging.getLogger('absl').setLevel(logging.ERROR)"  # turns a library's log down; says nothing itself


def imports(tree):
    """(module, name or None) of each import, wherever it stands, `if TYPE_CHECKING` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, None) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), each.name) for each in node.names)


def forbidden_imports(name, tree):
    """Modules of ours that the file may not see."""
    folder = name.split("/")[0]
    rule = max((each for each in ALLOWED if name.startswith(each)), key=len, default=None)
    for module, part in imports(tree):
        full = f"{module}.{part}" if part else module
        if module.startswith("."):
            yield module  # relative imports would get round this test
        elif module.split(".")[0] == "privot":
            if rule and not any(f"{full}.".startswith(f"{each}.") for each in ALLOWED[rule]):
                yield full
            touches_gate = any(f"{full}.".startswith(f"{each}.") for each in GATE_PARTS)
            # The private accuracy is a release of its own, so it goes through the gate.
            may_measure = name == "measures/private_accuracy.py"
            if folder in ("measures", "attacks", "audit") and touches_gate and not may_measure:
                yield full
            if (
                folder == "methods"
                and touches_gate
                and (module, part) != ("privot.privacy.gate", "Gate")
            ):
                yield full


def secret_attributes(name, tree):
    """The inside of a box, or in a method the inside of anything, by name or by a string that could become one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in (
                "self",
                "cls",
            )  # another class may have a name alike
            inside = node.attr in INSIDE and not name.startswith(INSIDERS)
            private = (
                name.startswith("methods/")
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
                and node.attr not in NAMED_TUPLE
            )
            if (inside or private) and not own:
                yield ast.unparse(node)
        elif isinstance(node, ast.ClassDef) and not name.startswith("data/"):
            yield from (
                ast.unparse(each)
                for each in node.bases
                if ast.unparse(each).endswith(("Sensitive", "_Dataset"))
            )
        elif (
            isinstance(node, ast.Constant)
            and node.value in INSIDE
            and not name.startswith(INSIDERS)
        ):
            yield repr(node.value)


def pickles(name, tree):
    """Code that could run when a file is read, or would write such a file."""
    for module, part in imports(tree):
        if module.split(".")[0] in PICKLES or (module == "torch" and part in ("load", "save")):
            yield module
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            loud = [
                each
                for each in node.keywords
                if each.arg == "allow_pickle" and ast.unparse(each.value) != "False"
            ]
            if (
                loud
                or (called in PICKLERS and not called.endswith(("np.load", "numpy.load")))
                or called in ("eval", "exec")
            ):
                yield ast.unparse(node)


def noises(name, tree):
    """Prints and logs where only the progress may speak."""
    if not name.startswith(QUIET):
        return
    allowed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and ast.unparse(node) == HUSH
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Name, ast.Attribute))
            and ast.unparse(node) in LOUD
            and id(node) not in allowed
        ):
            yield ast.unparse(node)


def global_seeds(name, tree):
    """Randomness that is nobody's: the process-wide generators, seeded or drawn from."""
    for module, _ in imports(tree):
        if module == "random":
            yield module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            legacy = text.startswith(("np.random.", "numpy.random.")) and node.attr not in (
                "default_rng",
                "Generator",
                "random",
            )
            if text in SEEDS or legacy:
                yield text


def carriers(name, tree):
    """Flower, Ray and what they bring, outside the places that an extra is installed for: the rest imports, and runs, without them."""
    for module, _ in imports(tree):
        first = module.split(".")[0]
        flower = first in (
            "flwr",
            "httpx",
            "uvicorn",
            "cryptography",
            "starlette",
            "fastapi",
        ) or f"{module}.".startswith(FLOWER)
        if flower and not name.startswith(("federated/flower/", "cli/federate")):
            yield module
        if first == "ray" and name not in (
            "attacks/shadows/workers.py",
            "federated/flower/simulation.py",
            "federated/flower/simulation_guards.py",
        ):
            yield module


RULES = (forbidden_imports, secret_attributes, pickles, noises, global_seeds, carriers)


# Condensation, whose methods promise nothing, may hold records.
MAY_HOLD_RECORDS = "baselines/condensation.py"


def held_as(name):
    """The name under whose rules a file is held: components and baselines are held to those of methods."""
    if name == MAY_HOLD_RECORDS:
        return name
    if name in AS_NETS:
        return f"nets/held/{name}"
    for folder in ("components/", "baselines/"):
        if name.startswith(folder):
            return f"methods/{name}"
    return name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule):
    broken = {name: list(rule(held_as(name), tree)) for name, tree in FILES.items()}
    assert {name: found for name, found in broken.items() if found} == {}


def test_the_package_was_read():
    assert {
        "privacy/gate.py",
        "privacy/ledger.py",
        "methods/dp_merf.py",
        "nets/__init__.py",
    } <= set(FILES)


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (forbidden_imports, "transport/sinkhorn.py", "from privot.data.spec import Spec"),
        (forbidden_imports, "nets/classifiers/lenet.py", "import privot.privacy.gate"),
        (
            forbidden_imports,
            "local/channels/laplace.py",
            "from privot.data.dataset import Sensitive",
        ),
        (forbidden_imports, "methods/dp_merf.py", "from privot.data.dataset import Sensitive"),
        (forbidden_imports, "methods/dp_merf.py", "from privot.data import Sensitive"),
        (forbidden_imports, "methods/dp_merf.py", "import privot"),
        (forbidden_imports, "methods/dp_merf.py", "from privot.privacy.noise import SecretRandom"),
        (forbidden_imports, "methods/dp_merf.py", "from privot.privacy import gate"),
        (forbidden_imports, "methods/dp_merf.py", "from privot.privacy.gate import SENSITIVITY"),
        (
            forbidden_imports,
            "methods/dp_merf.py",
            "def late():\n    from privot.privacy.ledger import Ledger",
        ),
        (forbidden_imports, "methods/dp_merf.py", "from ..data import records"),
        (forbidden_imports, "measures/fid.py", "from privot.privacy.gate import Gate"),
        (forbidden_imports, "attacks/membership/lira.py", "import privot.privacy.gate as door"),
        (secret_attributes, "methods/dp_merf.py", "x = gate._dataset"),
        (secret_attributes, "methods/dp_merf.py", "x = gate._shards[1]['critic']"),
        (secret_attributes, "synthesis/__init__.py", "n = box._count_records()"),
        (secret_attributes, "release/__init__.py", "x = box._images.mean()"),
        (secret_attributes, "cli/synthesize.py", "x = getattr(box, '_read_records')(slice(None))"),
        (secret_attributes, "cli/synthesize.py", "class Mine(dataset.Sensitive): pass"),
        (pickles, "release/__init__.py", "import pickle"),
        (pickles, "release/__init__.py", "from joblib import dump"),
        (pickles, "release/__init__.py", "torch.load(path)"),
        (pickles, "release/__init__.py", "from torch import load"),
        (pickles, "data/readers.py", "np.load(path, allow_pickle=True)"),
        (pickles, "data/readers.py", "np.load(path, allow_pickle=flag)"),
        (noises, "methods/dp_merf.py", "print(loss)"),
        (noises, "privacy/gate.py", "import logging\nlogging.info('x')"),
        (noises, "privacy/accounting.py", "import logging\nlogging.getLogger('absl').info('x')"),
        (noises, "methods/dp_merf.py", "import sys\nsys.stderr.write('x')"),
        (global_seeds, "methods/dp_merf.py", "torch.manual_seed(0)"),
        (global_seeds, "measures/fid.py", "np.random.seed(0)"),
        (global_seeds, "measures/fid.py", "x = np.random.randn(3)"),
        (global_seeds, "data/loading.py", "import random\nrandom.seed(0)"),
        (carriers, "federated/client.py", "from flwr.app import Message"),
        (carriers, "federated/server.py", "from privot.federated.flower import codec"),
        (carriers, "privacy/gate.py", "def late():\n    import ray"),
        (carriers, "release/__init__.py", "import httpx"),
    ],
)
def test_each_rule_can_see(rule, name, source):
    assert list(rule(name, ast.parse(source)))


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (
            forbidden_imports,
            "methods/dp_merf.py",
            "from privot.privacy.gate import Gate\nimport torch",
        ),
        (secret_attributes, "methods/dp_merf.py", "x = self._train(net)"),
        (secret_attributes, "measures/fid.py", "x = box._read_records(slice(None))"),
        (pickles, "data/readers.py", "np.load(path, allow_pickle=False)"),
        (
            noises,
            "privacy/accounting.py",
            "import logging\nlogging.getLogger('absl').setLevel(logging.ERROR)",
        ),
        (
            global_seeds,
            "methods/dp_merf.py",
            "torch.Generator().manual_seed(3)\nnp.random.default_rng(3)",
        ),
        (carriers, "federated/flower/client_app.py", "from flwr.app import Message"),
        (
            carriers,
            "federated/flower/supernode.py",
            "from privot.federated.flower.keys import create_keys",
        ),
    ],
)
def test_each_rule_lets_honest_code_pass(rule, name, source):
    assert not list(rule(name, ast.parse(source)))
