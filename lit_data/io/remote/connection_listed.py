"""Folders of S3 buckets, and of anything else that fsspec lists by itself."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from lit_data.errors import ConfigError, DataError, list_problems
from lit_data.io.remote.connection import Connection, RemoteFile
from lit_data.io.remote.manifest import SUMS_NAME, parse_list
from lit_data.io.remote.scope import Scope

S3: Final = ("s3", "s3a")
_TAGS: Final = ("ETag", "etag", "md5Hash", "md5", "content_md5", "checksum", "generation")
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
_HEX: Final = frozenset("0123456789abcdef")


class ListedConnection(Connection):
    """A folder of a file system that lists all files below it with their sizes."""

    @override
    def choose_settings(self, conf: dict[str, Any]) -> dict[str, Any]:
        s3_settings = [
            name for name in ("endpoint_url", "region", "anon") if getattr(self.options, name)
        ]
        if s3_settings:
            raise ConfigError(
                f"remote.{s3_settings[0]} is for S3, and data.root is {self.address.scheme}://...; "
                "settings of other file systems belong to the configuration files of fsspec, see "
                "docs/remote.md"
            )
        return {}

    @override
    async def list_files(self, scope: Scope) -> Sequence[RemoteFile]:
        root = self._class._strip_protocol(self.address.url).rstrip("/")
        listed: Mapping[str, Mapping[str, Any]] = await self.insist(
            lambda: self.call("find", root, detail=True)
        )
        if root in listed and len(listed) == 1:
            raise DataError(f"{self.address} is a file: give its folder")
        infos = {path.removeprefix(root).removeprefix("/"): info for path, info in listed.items()}
        # Consoles of S3 make folders as empty objects that end with a slash; the one of the root
        # has no name left.
        files = {
            n: info
            for n, info in infos.items()
            if info["type"] == "file" and n and not n.endswith("/")
        }
        if not files:
            raise DataError(f"{self.address}: no such folder, or it holds no file; check data.root")
        sums = await self._read_sums(files)
        return [
            self._describe(name, info, sums) for name, info in files.items() if scope.wants(name)
        ]

    @override
    def place(self, name: str) -> str:
        root = self._class._strip_protocol(self.address.url).rstrip("/")
        return f"{root}/{name}"

    async def _read_sums(self, files: Mapping[str, object]) -> Mapping[str, str | None]:
        name = self.options.file_list or SUMS_NAME
        if name not in files and self.options.file_list is None:
            return {}
        listed = parse_list(await self.read(name), self.address.name(name))
        missing = sorted(listed.keys() - files.keys())
        if missing:
            problems = list_problems(
                [(self.address.name(file), "listed, but not there") for file in missing]
            )
            raise problems.make_error(
                f"{len(missing)} files of {self.address.name(name)} are not there"
            )
        return listed

    def _describe(
        self, name: str, info: Mapping[str, Any], sums: Mapping[str, str | None]
    ) -> RemoteFile:
        size_bytes, sha256 = info.get("size"), sums.get(name)
        if not isinstance(size_bytes, int):
            raise DataError(f"{self.address.name(name)}: the server states no size")
        tag = next((str(info[key]).strip('"') for key in _TAGS if info.get(key)), "")
        time = next((info[key] for key in _TIMES if info.get(key)), None)
        version = sha256 or tag or str(time or "")
        return RemoteFile(
            name, size_bytes, version, _read_seconds(time), self.find_md5(tag), sha256
        )

    def find_md5(self, tag: str) -> str | None:
        """The MD5 sum that the tag of a file is, where it is one."""
        return None


class S3Connection(ListedConnection):
    """A folder of an S3 bucket, or of another server that speaks S3."""

    @override
    def choose_settings(self, conf: dict[str, Any]) -> dict[str, Any]:
        options = self.options
        client = dict(conf.get("client_kwargs") or {})
        if options.region is not None:
            client["region_name"] = options.region
        # Tried again by `insist` alone: layers of tries would multiply.
        config = dict(conf.get("config_kwargs") or {}) | {
            "connect_timeout": options.timeout_s,
            "read_timeout": options.timeout_s,
            "max_pool_connections": options.connections,
            "retries": {"total_max_attempts": 1},
        }
        settings = {"client_kwargs": client, "config_kwargs": config, "max_concurrency": 1}
        if options.endpoint_url is not None:
            settings["endpoint_url"] = options.endpoint_url
        return settings | ({"anon": True} if options.anon else {})

    @override
    def adapt(self, fs: Any) -> None:
        fs.retries = 1

    @override
    async def is_sum(self, file: RemoteFile) -> bool:
        """The ETag of an object that is encrypted with a key of its own is no sum; only its own headers say so."""
        bucket, _, key = self.place(file.name).partition("/")
        head = await self.insist(
            lambda: self._fs._call_s3("head_object", Bucket=bucket, Key=key), file.name
        )
        return "SSECustomerAlgorithm" not in head and not head.get(
            "ServerSideEncryption", ""
        ).startswith("aws:kms")

    @override
    def find_md5(self, tag: str) -> str | None:
        """The ETag of an object that was not put together from parts is its MD5 sum."""
        return tag if len(tag) == 32 and _HEX.issuperset(tag) else None


def _read_seconds(time: object) -> int:
    if isinstance(time, datetime):
        return max(0, int(time.timestamp()))
    return max(0, int(time)) if isinstance(time, int | float) else 0
