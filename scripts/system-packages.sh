#!/bin/sh
# Installs what pip cannot: the OpenSSH server and client, rsync, ip and ping, and Python's venv where it is a package of
# its own. Says and does nothing where all of it is there. Needs root or a sudo that asks no password; without, it says
# what to install. The embedded local cluster only uses the sshd program: a service that comes with it is switched off.
# Arguments are further programs: slurmctld, slurmd, sbatch, munged, mpirun.openmpi, mpirun.mpich, kubectl, podman, runc, conmon, newuidmap,
# dockerd, docker, etcd, etcdctl.
set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

has() { command -v "$1" >/dev/null 2>&1; }

missing=
for program in sshd ssh rsync ip ping; do
    case $(uname -s):$program in
        Linux:* | *:sshd | *:ssh | *:rsync) has $program || missing="$missing $program" ;;
    esac
done
for program; do
    has "$program" || missing="$missing $program"
done
python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
    has "$python" || missing="$missing python"
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing venv"
fi
[ -n "$missing" ] || exit 0

package() { # program -> its package, in the words of apt-get, dnf or apk
    case $1:$2 in
        apt-get:sshd | dnf:sshd) echo openssh-server ;;
        apk:sshd) echo openssh-server openssh-keygen ;;
        apt-get:ssh | apk:ssh) echo openssh-client ;;
        dnf:ssh) echo openssh-clients ;;
        *:rsync) echo rsync ;;
        dnf:ip) echo iproute iproute-tc ;;
        *:ip) echo iproute2 ;;
        apt-get:ping) echo iputils-ping ;;
        *:ping) echo iputils ;;
        *:python) echo python3 ;;
        apt-get:venv) echo "$(basename "$python")-venv" ;;
        dnf:venv) echo python3-pip ;;
        apk:venv) echo py3-pip ;;
        apt-get:slurm*) echo "$2" ;;
        dnf:slurm*) echo "slurm-$2" ;;
        apt-get:sbatch) echo slurm-client ;;
        dnf:sbatch) echo slurm ;;
        *:munged) echo munge ;;
        apt-get:mpirun.openmpi) echo openmpi-bin ;;
        apt-get:mpirun.mpich) echo mpich ;;
        apt-get:etcd) echo etcd-server ;;
        apt-get:etcdctl) echo etcd-client ;;
        apk:kubectl) echo kubectl ;;
        *:kubectl) echo kubernetes-client ;;
        *:podman) echo podman ;;
        *:runc) echo runc ;;
        *:conmon) echo conmon ;;
        apt-get:dockerd) echo docker.io ;;
        apk:dockerd) echo docker-engine ;;
        apt-get:docker) echo docker.io ;;
        apk:docker) echo docker-cli ;;
        apt-get:newuidmap) echo uidmap ;;
        dnf:newuidmap) echo shadow-utils ;;
        apk:newuidmap) echo shadow-uidmap ;;
    esac
}

for manager in apt-get dnf apk none; do
    has $manager && break
done
packages=
for program in $missing; do
    packages="$packages $(package $manager "$program")"
done

root=
[ "$(id -u)" = 0 ] || { has sudo && sudo -n true 2>/dev/null && root="sudo -n"; } || root=no
if [ $manager = none ] || [ "$root" = no ]; then
    echo "clustertool needs these programs:$missing" >&2
    [ $manager = none ] || echo "  install them:  sudo $manager $([ $manager = apk ] && echo add || echo install)$packages" >&2
    exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    case $manager in
        apt-get)
            # RUNLEVEL=1: start no service
            apt="$root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -q -o DPkg::Lock::Timeout=120"
            $apt update || echo "going on with the package lists that are here"
            $apt install -y --no-install-recommends $packages
            ;;
        dnf) $root dnf -q -y install $packages ;;
        apk) $root apk add $packages ;;
    esac
}
echo "installing:$packages" >&2
if ! install >"$log" 2>&1; then
    cat "$log" >&2
    echo "these packages could not be installed:$packages" >&2
    exit 1
fi
services= # which start with a package that is here for its programs
for program in $missing; do
    case $program in
        sshd) services="$services ssh.service ssh.socket sshd.service sshd.socket" ;;
        slurmctld | slurmd) services="$services $program.service" ;;
        munged) services="$services munge.service" ;;
        dockerd) services="$services docker.service docker.socket containerd.service" ;;
        podman) services="$services podman.service podman.socket podman-auto-update.timer podman-restart.service" ;;
    esac
done
if [ -n "$services" ] && [ -d /run/systemd/system ]; then
    $root systemctl disable --now $services >/dev/null 2>&1 || true
fi
