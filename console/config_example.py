"""The ``fleet.toml`` that ``glowplug config example`` prints: valid as it stands, every key explained."""

EXAMPLE = """\
# Glowplug's fleet. `glowplug config check` reads this file and names every mistake.

[defaults]                      # for every node that has no setting of its own
# user = "ops"                  # otherwise ssh's own choice
# identity = "~/.ssh/fleet"     # one private key file, or a list; otherwise ssh-agent and ~/.ssh/id_*
# jump = "bastion"              # a node, or [user@]host[:port]; a list is a chain, nearest first
# known_hosts = "known_hosts"   # only this file, in place of ~/.ssh/known_hosts and the system's
# ssh_config = true             # ask `ssh -G` for what is not set here; a file name: as with `ssh -F FILE`
# port = 22
# agent = "/opt/glowplug-agent.pyz"  # by default ~/.local/share/glowplug/glowplug-agent.pyz, else python's own
# tags = ["gpu"]                # for every node that names none
# state_directory = "~/.local/state/glowplug-agent"
# storage_group = "nas-1"       # nodes that load from one storage; see [storage_groups]
# hold_budget = "80%"           # what warm models may take of each device, or "60 GB"; more is refused or makes room
python = "python3"              # the host's own GPU Python, or an argv: ["conda", "run", "-n", "gpu", "python"]
parallel = 4                    # runs at one time when several nodes are warmed
connect_timeout_s = 20

[nodes.gpu-1]                   # with no host, the name is an alias that ssh's own configuration resolves
tags = ["eu"]

[nodes.gpu-2]                   # what stands in [defaults] may stand here as well, but for parallel
host = "192.0.2.12"
port = 22
user = "ops"
# host_key_alias = "gpu-2"      # the name under which known_hosts has its key
# identity = "~/.ssh/fleet"
# known_hosts = "known_hosts"
# ssh_config = false
# state_directory = "/var/lib/glowplug-agent"
# hold_budget = "60 GB"
storage_group = "nas-1"
# connect_timeout_s = 5
python = "/opt/venv/bin/python"
agent = "/opt/glowplug/glowplug-agent.pyz"
tags = ["eu", "h200"]
recipes = ["llama"]             # what this node is for; none: any recipe

[nodes.gpu-3]
host = "192.0.2.13"
storage_group = "nas-1"
jump = ["ops@bastion.example:2222"]
tags = ["us"]

[nodes.pod-1]                   # any program that gives stdio on the host, in place of SSH
transport = ["kubectl", "exec", "-i", "gpu-pod-1", "--"]
tags = ["k8s"]

[storage_groups]                # loads at one time from each storage that nodes share; 1 where nothing is said
nas-1 = 2

[recipes.llama]
dtype = "bfloat16"              # or auto (the files'), float32, float16
devices = ["auto"]              # auto, all, cpu, cuda:N or GPU UUIDs
target_tier = "standby"         # or resident: the weights alone stay, and need no process; cached, host: see below
trust_remote_code = false       # true: run Python that comes with the model
# environment = { OMP_NUM_THREADS = "8" }  # variables of the process that loads

[recipes.llama.model]
path = "/models/llama-2-7b"     # on the host: a directory of safetensors, one such file, or a Hugging Face cache's
# revision = "main"             # which snapshot of a Hugging Face cache's directory
adapter = "native"              # the one way to load so far; engine is refused

[recipes.llama.weights]
path = "auto"                   # to a GPU: mapped (from the page cache), staged (by buffers) or direct (past the cache)
page_cache = "keep"             # bypass: what is not cached yet is read past the page cache

[recipes.llama.request]         # the one request that proves readiness
kind = "generate"               # or encode, for an encoder; auto: what the model is
# prompt = "Once upon a time"   # by the model's tokenizer; otherwise prompt_tokens ids, always the same
prompt_tokens = 128
batch = 1
max_new_tokens = 1
shapes = [{ batch = 1, tokens = 128 }]  # warmed before, besides the request's own
sampling = { temperature = 0.0, seed = 0 }  # 0: greedy

[recipes.llama.compile]
mode = "off"                    # off, layer or model
# cache_directory = "/var/cache/glowplug"  # on the host; by default below the agent's state directory

[recipes.llama.hold]
# owner = "team-a"              # who is named as the holder; by default whoever starts the run
# ttl_s = 3600                  # how long it stays warm; otherwise until it is released
make_room = false               # true: idle models go where memory or hold_budget is short, the longest unused first

[recipes.llama.deadlines]       # seconds a stage
weights = 600

[recipes.chat]                  # warm, and served by a function of yours: docs/serving.md
model = { path = "/models/llama-2-7b" }
target_tier = "resident"

[recipes.chat.serve]            # once the model is warm, a process attaches to it and calls entry
entry = "completion_server:serve"  # module:function
path = "/opt/glowplug/examples" # on the host: where Python looks for the module first
host = "127.0.0.1"
port = 8000
# health = "/health"            # must answer 200 before the request is sent
ready_timeout_s = 60

[recipes.chat.serve.request]    # the run is ready once this is answered
path = "/v1/completions"
# body = { prompt = "Hello", max_tokens = 1 }  # otherwise the recipe's own request, in OpenAI's style

[recipes.llama-files]           # before traffic shifts: no GPU is touched
model = { path = "/models/llama-2-7b" }
target_tier = "cached"          # in the page cache; or host: registered with a GPU, for the next run of the model
hold = { lock = true }          # with cached: a small process locks the pages until it is released

[recipes.embed]
model = { path = "/models/all-minilm-l6-v2" }
request = { kind = "encode", prompt = "A sentence to embed." }

[[rollout]]                     # a recipe to many nodes: `glowplug rollout plan eu-llama`, then `start`
name = "eu-llama"
selector = "tag:eu"             # a name, tag:NAME, a pattern, all, or a list of these
recipe = "llama"
canary = 1                      # nodes, or "10%" of those selected, in a batch before all others
serial = [1, "50%"]             # a batch each; the last entry repeats. Percentages round down, to at least 1
order = "as_listed"             # or coldest_first, or tags whose nodes come first: ["tag:h200", "tag:eu"]
max_unavailable = 1             # so many at once are taken out; those that are down anyway count
max_failures = 1                # reached over the whole rollout, it aborts; a failed gate below it waits for you
progress_deadline_s = 1800      # without a node that becomes ready for so long, it aborts
node_timeout_s = 900            # what a node may take to drain and warm, and again to shift
retries = 1                     # tries of a node after its first
backoff_s = 10                  # before the first of them; then twice as long each time
pause_after = [1]               # batches, from 1, after which it waits for the operator

[[rollout.gates]]               # what must hold before a batch is shifted: one of measure, tier, command and http
measure = "first_output"        # or total, or a stage
limit_s = 0.5                   # at most
count = 5                       # samples
interval_s = 2                  # between them
failure_limit = 1               # so many may fail
consecutive_success = 3         # so many in a row are enough
batches = [1]                   # for these batches alone; otherwise for all

[[rollout.gates]]
measure = "weights"
factor = 1.5                    # at most so many times the median of the node's runs from the same tier

[[rollout.gates]]
tier = "standby"                # reached, or a warmer one

[[rollout.gates]]
command = ["/opt/checks/errors-are-low"]  # no shell; exit 0 passes, 75 is inconclusive
timeout_s = 10

[[rollout.gates]]
http = "http://{host}:8000/health"  # each node's own; {node}: its name. Without either one address for all
status = 200

[rollout.hooks]                 # programs that move traffic, for one node; no shell, exit 75 tries again
before_shift = { argv = ["/opt/hooks/drain"], timeout_s = 120, dry_run = true }  # before the node is warmed; dry_run:
                                # with GLOWPLUG_ROLLOUT_DRY_RUN=1 it changes nothing, so `plan --try-hooks` may run it
shift = { argv = ["/opt/hooks/shift"], timeout_s = 60, dry_run = true }  # once the gates of its batch passed
after_shift = { argv = ["/opt/hooks/check"], timeout_s = 60, dry_run = false }
on_abort = { argv = ["/opt/hooks/back-out"], timeout_s = 60, dry_run = true }  # for a node that did not become ready;
                                # required
"""
