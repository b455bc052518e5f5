"""The ``fleet.toml`` that ``glowplug config example`` prints: valid as it stands, every key explained."""

EXAMPLE = """\
# Glowplug's fleet. `glowplug config check` reads this file and names every mistake.

[defaults]                      # for every node that has no setting of its own
# user = "ops"                  # otherwise ssh's own choice
# identity = "~/.ssh/fleet"     # one private key file, or a list; otherwise ssh-agent and ~/.ssh/id_*
# jump = "bastion"              # a node, or [user@]host[:port]; a list is a chain, nearest first
# known_hosts = "known_hosts"   # only this file, in place of ~/.ssh/known_hosts and the system's
# ssh_config = true             # ask `ssh -G` for what is not set here
# state_directory = "~/.local/state/glowplug-agent"
python = "python3"              # the host's own GPU Python, or an argv: ["conda", "run", "-n", "gpu", "python"]
parallel = 4                    # runs at one time when several nodes are warmed
connect_timeout_s = 20

[nodes.gpu-1]                   # with no host, the name is an alias that ssh's own configuration resolves
tags = ["eu"]

[nodes.gpu-2]
host = "192.0.2.12"
port = 22
user = "ops"
python = "/opt/venv/bin/python"
agent = "/opt/glowplug/glowplug-agent.pyz"
tags = ["eu", "h200"]
recipes = ["llama"]             # what this node is for; none: any recipe

[nodes.gpu-3]
host = "192.0.2.13"
jump = ["ops@bastion.example:2222"]
tags = ["us"]

[nodes.pod-1]                   # any program that gives stdio on the host, in place of SSH
transport = ["kubectl", "exec", "-i", "gpu-pod-1", "--"]
tags = ["k8s"]

[recipes.llama]
model = { path = "/models/llama-2-7b" }
dtype = "bfloat16"
devices = ["auto"]              # auto, all, cpu, cuda:N or GPU UUIDs
target_tier = "standby"         # or resident: the weights alone stay, and need no process; cached, host: see below

[recipes.llama.request]
kind = "generate"
prompt_tokens = 128
shapes = [{ batch = 1, tokens = 128 }]

[recipes.llama.compile]
mode = "off"                    # off, layer or model

[recipes.llama.deadlines]       # seconds a stage
weights = 600

[recipes.llama-files]           # before traffic shifts: no GPU is touched
model = { path = "/models/llama-2-7b" }
target_tier = "cached"          # in the page cache; or host: registered with a GPU, for the next run of the model
hold = { lock = true }          # with cached: a small process locks the pages until it is released

[recipes.embed]
model = { path = "/models/all-minilm-l6-v2" }
request = { kind = "encode", prompt = "A sentence to embed." }
"""
