"""This module reads the way to an API server (address, TLS, credentials) from the user's kubeconfig by the official client."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from clustertool.errors import AuthError, ConfigError

try:
    from kubernetes.client.configuration import Configuration
    from kubernetes.client.rest import RESTClientObject
    from kubernetes.config import kube_config
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.config.incluster_config import InClusterConfigLoader
except ImportError:  # the extra is not installed
    kube_config = None

_DEFAULT = "~/.kube/config"
_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod in which this program runs
_CONNECTIONS = 16  # that are kept open, for the threads of a command
_FIX = "set KUBECONFIG, or KUBERNETES = {'context': NAME} in conf.py; kubectl config get-contexts lists them"


class KubeCredentials:
    """The address, TLS settings and credentials of an API server, with a pool of connections to it.

    namespace: of the context, "" if it has none. user: its name in the kubeconfig.
    """

    def __init__(self, context: str = "") -> None:
        """Read the kubeconfig, or the service account of the pod in which this runs, and prepare the connections.

        The latter counts only without kubeconfig and context. Runs the program for credentials that the kubeconfig names.
        context: "" for the current one. Raises ConfigError without the official client, or if neither is there or valid;
        AuthError if the program gives no credentials.
        """
        if kube_config is None:
            what = "the engine kubernetes needs the official client, and it is not installed"
            raise ConfigError(what, "pip install 'clustertool[kubernetes]'")
        # A call of the class itself would copy what another part of the program has set as default.
        self.configuration = type.__call__(Configuration)
        self.namespace = self.user = self.context = ""
        files = [os.path.expanduser(path) for path in (os.environ.get("KUBECONFIG") or _DEFAULT).split(os.pathsep)]
        if any(os.path.exists(path) for path in files if path):
            self._read_kubeconfig(os.pathsep.join(files), context)
        elif os.environ.get("KUBERNETES_SERVICE_HOST") and not context:
            self._read_service_account()
        else:
            raise ConfigError(f"there is no kubeconfig: {', '.join(filter(None, files))}", _FIX)
        self.configuration.retries = False  # cluster_api.py decides what is repeated
        self.configuration.connection_pool_maxsize = _CONNECTIONS
        self.pool = RESTClientObject(self.configuration).pool_manager

    @property
    def where(self) -> str:
        """The context and the host of the server, for messages."""
        host = self.host.partition("://")[2] or self.host
        return f"{self.context} ({host})" if self.context else host

    @property
    def host(self) -> str:
        return str(self.configuration.host)

    def headers(self) -> dict[str, str]:
        """Return the credentials of a request as headers; renew those that have expired."""
        found: Mapping[str, Mapping[str, str]] = self.configuration.auth_settings()
        return {one["key"]: one["value"] for one in found.values() if one.get("in") == "header" and one["value"]}

    def _read_kubeconfig(self, files: str, context: str) -> None:
        """Read a context of the kubeconfig files into this object. files: paths, separated by ":"; context: "" for the current.

        Raises ConfigError if the files are not valid or have no such context, AuthError if its program gives no credentials.
        """
        with _ErrorLog() as logged:
            try:
                contexts, current = kube_config.list_kube_config_contexts(files)
                chosen = next((one for one in contexts if one["name"] == context), None) if context else current
                if chosen is None:
                    known = ", ".join(str(one["name"]) for one in contexts)
                    raise ConfigError(f"the kubeconfig has no context {context!r}", f"known: {known}")
                kube_config.load_kube_config(files, chosen["name"], self.configuration)
            except (ConfigException, KeyError, TypeError, ValueError, OSError) as error:
                raise ConfigError(f"the kubeconfig is not valid: {error!s:.300}", _FIX) from None
        fields = chosen["context"]
        self.context, self.user = str(chosen["name"]), str(_text_field(fields, "user"))
        self.namespace = str(_text_field(fields, "namespace"))
        if logged.errors:  # the client goes on without credentials
            what = f"no credentials for the user {self.user}: {'; '.join(logged.errors)}"
            raise AuthError(what, "run the program of this user's exec section by hand, and log in")

    def _read_service_account(self) -> None:
        """Read the service account of the pod in which this program runs, and its namespace, into this object.

        Raises ConfigError if a file of it cannot be used.
        """
        try:
            loader = InClusterConfigLoader(token_filename=str(_POD / "token"), cert_filename=str(_POD / "ca.crt"))
            loader.load_and_set(self.configuration)
            self.namespace = (_POD / "namespace").read_text("utf-8").strip()
        except (ConfigException, OSError) as error:
            raise ConfigError(f"the service account of this pod cannot be used: {error}", _FIX) from None


def _text_field(fields: Mapping[str, object], name: str) -> object:
    """Return the value of a field; "" if it is absent or null."""
    return fields[name] if name in fields and fields[name] is not None else ""


class _ErrorLog(logging.Handler):
    """A context manager that collects in `errors` what the client logs as an error in place of raising it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(" ".join(record.getMessage().split())[:300])

    def __enter__(self) -> _ErrorLog:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
