"""The handle of a node that answers calls."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lp_pipe.address import Address
from lp_pipe.errors import Unavailable
from lp_pipe.handles.base import Handle
from lp_pipe.launched import caused_by_first_failure, is_launcher_of, services_for
from lp_pipe.rpc import CourierClient
from lp_pipe.telemetry import waits


class CourierHandle(Handle[CourierClient]):
    """A handle that dereferences to a CourierClient of the node's server."""

    def __init__(self, address: Address, client_kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._address = address
        self._client_kwargs = dict(client_kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "node_name":
            raise AttributeError(
                f"cannot set {name!r} of {self!r}: a handle only stands for the node, and its object would not get it. "
                "Give its class a method for that, and call it on a client"
            )
        super().__setattr__(name, value)

    @property
    def addresses(self) -> list[Address]:
        return [self._address]

    def set_client_kwargs(self, *, call_timeout: float | timedelta | None = None, wait_for_ready: bool = True) -> None:
        """Replace the options of the clients made from this handle."""
        self._client_kwargs = {"call_timeout": call_timeout, "wait_for_ready": wait_for_ready}

    def dereference(self) -> CourierClient:
        services = services_for(self._address.id)
        if services is None:
            raise RuntimeError(f"cannot dereference the handle of {self.node_name}: its program is not launched")
        if is_launcher_of(self._address.id):
            with waits.waiting(waits.RESOLVE, waits.Target("", self._address.id, self.node_name)):
                try:
                    services.resolve(self._address.id).result()
                except Unavailable as error:
                    raise caused_by_first_failure(services, error, str(error)) from error
        return self._client(services.endpoint_for(self._address.id))

    def _client(self, endpoint: str) -> CourierClient:
        return CourierClient(endpoint, **self._client_kwargs, address_id=self._address.id, peer=self.node_name)
