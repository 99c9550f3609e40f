"""Runs the container of a pod template as processes of this machine, confined as Kubernetes does.

It has namespaces of its own for processes, network and mounts, the user and the capabilities of its
security context, a read-only root, and the volumes of the template. The image is this machine: its
programs are those of the test's virtual environment. It needs root, and no container runtime.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests import ROOT
from tiny_server import children_of, command_of, wait_for

NEEDED = ("unshare", "nsenter", "setpriv", "chroot", "ip", "curl")
# folders of the machine that a container has of its own
_OWN_FOLDERS = ("dev", "proc", "sys", "tmp", "root", "home", "run", "models", "mnt")
_SIZE = "size=2g"


def reason_to_skip() -> str:
    """Return why pods cannot run here, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"])
    return "" if tried.returncode == 0 else "namespaces are not allowed here"


class Pod:
    def __init__(
        self,
        template: Mapping[str, Any],
        folder: Path,
        claims: Mapping[str, Path],
        secrets: Mapping[str, Mapping[str, str]],
        more: Mapping[str, str] | None = None,
        arguments: Mapping[str, str] | None = None,
        network: str = "",
    ) -> None:
        """`claims`: folders of persistent volumes. `secrets`: entries of secrets by name.

        `more`: variables that a controller adds. `arguments`: those to replace, as there is no GPU.
        `network`: address of the pod; it starts when `connect` has made it.
        """
        self._spec = template["spec"]
        (self.container,) = self._spec["containers"]
        self._claims = claims
        self._secrets = secrets
        self._security = self._spec.get("securityContext", {}) | self.container["securityContext"]
        self._root = folder / "root"
        self._root.mkdir(parents=True)
        self.network = network
        self._log = folder / "log"
        script = folder / "start.sh"
        script.write_text("\n".join(self._set_up()) + "\n")
        words = [*self.container["command"], *self.container.get("args", [])]
        replaced = [(arguments or {}).get(word, word) for word in words]
        namespaces = ["--mount", "--net", "--pid", "--fork", "--kill-child"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", *namespaces, "sh", "-e", str(script), *replaced],
                env=self._environment(more or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: children_of(self._process.pid) or self._process.poll() is not None)
        (self.process_id,) = children_of(self._process.pid)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        found = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
        found |= {"PYTHONPATH": str(ROOT), **more}
        for variable in self.container.get("env", []):
            value = variable.get("value")
            if value is None:
                place = variable["valueFrom"]["secretKeyRef"]
                value = self._secrets[place["name"]][place["key"]]
            found[variable["name"]] = value
        return found

    def _set_up(self) -> list[str]:
        """Return the shell's commands before the container's own."""
        root = self._root
        layers = f"{root}.layers"
        mounted_in = {Path(one["mountPath"]).parts[1] for one in self.container["volumeMounts"]}
        mounted_in -= set(_OWN_FOLDERS)
        lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 root {root}"]
        lines.append(f"mkdir {layers}; mount -t tmpfs layers {layers}")
        for entry in sorted(Path("/").iterdir()):
            place = root / entry.name
            if entry.is_symlink():
                lines.append(f"cp -a {entry} {place}")
            elif entry.name in mounted_in:  # a folder in which volumes are mounted
                upper = f"{layers}/{entry.name}"
                lines.append(f"mkdir -p {place} {upper}/upper {upper}/work")
                options = f"lowerdir={entry},upperdir={upper}/upper,workdir={upper}/work"
                lines.append(f"mount -t overlay -o {options} root {place}")
            elif entry.is_dir() and entry.name not in _OWN_FOLDERS:
                lines.append(f"mkdir {place}; mount --rbind {entry} {place}")
                lines.append(f"mount -o remount,bind,ro {place}")
        lines.append(f"mkdir {root}/proc; mount -t proc proc {root}/proc")
        lines.append(f"mkdir {root}/dev; mount --rbind /dev {root}/dev")
        for mount in self.container["volumeMounts"]:
            lines += self._mount(mount)
        for program in (sys.base_prefix, sys.prefix, str(ROOT)):
            if Path(program).parts[1] in _OWN_FOLDERS:
                lines.append(f"mkdir -p {root}{program}; mount --bind {program} {root}{program}")
        if self._security["readOnlyRootFilesystem"]:
            lines += [f"mount -o remount,ro {root}/{name}" for name in sorted(mounted_in)]
            lines.append(f"mount -o remount,ro {root}")
        lines.append("ip link set lo up")
        if self.network:
            lines.append("until ip -4 addr show dev eth0 2>&1 | grep -q inet; do sleep 0.05; done")
        return [*lines, self._start()]

    def _mount(self, mount: Mapping[str, Any]) -> list[str]:
        place = f"{self._root}{mount['mountPath']}"
        (volume,) = (one for one in self._spec["volumes"] if one["name"] == mount["name"])
        lines = [f"mkdir -p {place}"]
        if "persistentVolumeClaim" in volume:
            lines.append(f"mount --bind {self._claims[volume['name']]} {place}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {place}")
            return lines
        user = self._security["runAsUser"]
        group = self._security.get("fsGroup", 0)
        lines.append(f"mount -t tmpfs -o uid={user},gid={group},mode=770,{_SIZE} volume {place}")
        if "secret" in volume:
            for name, value in self._secrets[volume["secret"]["secretName"]].items():
                lines.append(f"printf %s {value} > {place}/{name}; chmod 440 {place}/{name}")
                lines.append(f"chown 0:{group} {place}/{name}")
        return lines

    def _start(self) -> str:
        user = self._security["runAsUser"]
        group = self._security.get("runAsGroup", 0)
        groups = self._security.get("fsGroup", group)
        drop = f"--reuid {user} --regid {group} --groups {groups} --no-new-privs"
        drop += " --bounding-set=-all --inh-caps=-all"
        return f'exec chroot {self._root} setpriv {drop} -- "$@"'

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def in_network(self, *words: str) -> str:
        """Run a command in the network of the pod; return its output."""
        command = ["nsenter", f"--net=/proc/{self.process_id}/ns/net", *words]
        return subprocess.run(command, capture_output=True, text=True).stdout

    def probe(self, name: str) -> bool:
        """Return whether a probe of the manifest succeeds."""
        wanted = self.container[name]["httpGet"]
        port = wanted["port"]
        named = {one.get("name"): one["containerPort"] for one in self.container["ports"]}
        url = f"http://127.0.0.1:{named.get(port, port)}{wanted['path']}"
        status = self.in_network("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url)
        return 200 <= int(status or 0) < 400

    def wait_started(self, seconds: float = 90) -> None:
        """Wait for the startup probe."""

        def started() -> bool:
            assert self.running, self.log()[-3000:]
            return self.probe("startupProbe")

        wait_for(started, seconds)

    def ask(self, port: int, path: str, body: Mapping[str, Any], key: str = "") -> dict[str, Any]:
        """POST a request; return the answer."""
        headers = ["-H", f"Authorization: Bearer {key}"] if key else []
        url = f"http://127.0.0.1:{port}{path}"
        text = self.in_network("curl", "-s", *headers, "-d", json.dumps(body), url)
        found: dict[str, Any] = json.loads(text)
        return found

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def status(self) -> dict[str, str]:
        """Return the lines of /proc/PID/status of the container's first process."""
        lines = Path(f"/proc/{self.process_id}/status").read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    def engine_processes(self) -> list[int]:
        """Return the engine processes that the container's first process has started."""
        found = children_of(self.process_id)
        return [child for child in found if "slipstream.engine_worker" in command_of(child)]

    def can_write(self, path: str) -> bool:
        """Return whether the container's user could write this path."""
        user = str(self._security["runAsUser"])
        command = ["nsenter", "-t", str(self.process_id), "-m", "-r", "setpriv", "--reuid", user]
        command += ["--regid", user, "--clear-groups", "test", "-w", path]
        return subprocess.run(command).returncode == 0

    def terminate(self) -> None:
        os.kill(self.process_id, signal.SIGTERM)

    def wait_terminated(self) -> int:
        """Return the exit code. Fail after the grace period."""
        return self.wait_exit(self._spec["terminationGracePeriodSeconds"])

    def wait_exit(self, seconds: float) -> int:
        """Return the exit code of the container."""
        return self._process.wait(seconds)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def connect(first: Pod, second: Pod) -> None:
    """Give two pods a network of their own."""
    pair = ["eth0", "netns", str(first.process_id), "type", "veth", "peer", "name", "eth0"]
    subprocess.run(["ip", "link", "add", *pair, "netns", str(second.process_id)], check=True)
    for pod in (first, second):
        pod.in_network("ip", "link", "set", "eth0", "up")
        pod.in_network("ip", "addr", "add", pod.network, "dev", "eth0")
