# Looks at a host and changes nothing there. The console sets before it: token, code, link, state and "$@", the node's
# python. Each line of the answer is TOKEN NAME=VALUE.
PATH="${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
export PATH

tell() {
    printf '\n%s %s=%s\n' "$token" "$1" "$2"
}

# The nearest directory above a path that is there.
nearest() {
    near=$1
    while [ ! -d "$near" ] && [ -n "$near" ]; do near=${near%/*}; done
    near=${near:-/}
}

# The type and options of the file system that a directory lies on: the longest mount point above it, the last of equals.
mount_of() {
    best= mounted=
    while read -r _ point type options _; do
        stem=${point%/} # a case of its own: bash takes "${point%/}"/* for nothing where the stem is empty
        case "$1/" in
        "$stem"/*) [ ${#point} -lt ${#best} ] || best=$point mounted="$type $options" ;;
        esac
    done </proc/self/mounts
}

column() {
    shift 3
    printf %s "$1"
}

place() {
    nearest "$2"
    mount_of "$(cd -P "$near" && pwd -P)"
    tell "$1" "$2"
    tell "$1.near" "$near"
    tell "$1.mount" "$mounted"
    tell "$1.free_kib" "$(column $(df -Pk "$near" | tail -n 1))"
    [ -w "$near" ] && [ -x "$near" ] && tell "$1.writable" yes
}

# Whether systemd ends what this account runs once it has logged out, and the agent is no service of its own there.
ends_at_logout() {
    [ "$(id -u)" != 0 ] || return # logind leaves root's alone
    case $(busctl get-property org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager \
        KillUserProcesses) in *true*) ;; *) return ;; esac
    [ -e "/var/lib/systemd/linger/$(id -un)" ] && systemctl --user -q is-enabled glowplug-agent.service && return
    tell ends_at_logout yes
}

# Other Pythons of this host, asked only where the node's own is not what it should be.
candidates() {
    for python in "$HOME"/*/bin/python3 "$HOME"/.*/bin/python3 /opt/*/bin/python3 /usr/local/bin/python3* \
        /usr/bin/python3*; do
        case "$python" in *[!a-zA-Z0-9._/-]* | *config | */../* | */./*) continue ;; esac
        [ -x "$python" ] || continue
        found=$("$python" -c "$code" brief 2>/dev/null) && tell candidate "$python $found"
    done
}

look() {
    tell system "$(uname -s)"
    tell machine "$(uname -m)"
    tell home "$HOME"
    [ -d "$HOME" ] && tell home.there yes
    tell link "$link"
    place target "${link%/*}"
    place state "$state"
    ends_at_logout
    [ -f "${link%/*}/versions/previous.pyz" ] && tell previous "${link%/*}/versions/previous.pyz"
    if [ -r /proc/driver/nvidia/version ]; then
        read -r driver </proc/driver/nvidia/version
        tell driver "$driver"
    fi
    for vendor in /sys/bus/pci/devices/*/vendor; do
        [ -r "$vendor" ] && read -r number <"$vendor" && [ "$number" = 0x10de ] && tell gpu yes && break
    done
    if said=$("$@" -c "$code" "$token" 2>&1); then
        printf '\n%s\n' "$said"
    else
        tell python.error "$(printf '%s\n' "$said" | tail -n 1)"
        tell python.said "$("$@" --version 2>&1 | tail -n 1)"
    fi
    case "$said" in *python.fits=yes*torch.version=*) ;; *) candidates ;; esac
    tell end yes
}

look "$@" </dev/null 2>/dev/null
exit 0
