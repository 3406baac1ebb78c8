//! Arguments of all commands that talk to a cluster.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use bafs_proto::path::from_bytes;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

/// A path, or a URL with one, whose names need not be UTF-8.
pub(super) fn path_text() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().map(|path| from_bytes(path.as_bytes()))
}

/// How to reach a cluster.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClientArgs {
    /// Identity: a directory that `bafs init` or `bafs grant` created.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: PathBuf,
    /// Address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: String,
}
