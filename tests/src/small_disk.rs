//! Nodes with stores on small private disks. Judges nothing.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::{TestCluster, bafs_program};

/// Starts a node named `small` that offers 500 MB. Its store is in `store`, on a private file
/// system, mounted with the options `disk` (words for `mount`; needs root). It ends with its input.
///
/// # Errors
/// The node does not start.
pub fn start_node_on_disk(disk: &str, world: &TestCluster, store: &str) -> Result<Child> {
    let script = format!(
        "mount {disk} {store} && exec \"$0\" node --store {store}/node \
         --size 500MB --name small --until-stdin-closes"
    );
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", &script])
        .arg(bafs_program())
        .env("BAFS_IDENTITY", world.cluster.identity())
        .env("BAFS_CATALOG", world.cluster.catalog_address())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut node = command.spawn()?;
    let stdout = node.stdout.take().context("standard output is piped")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(line.contains("listening"), "the node does not start");
    Ok(node)
}

/// A path as a process sees it that has mounts of its own.
pub fn path_in_namespace(node: &Child, path: &str) -> PathBuf {
    let root = Path::new("/proc").join(node.id().to_string()).join("root");
    root.join(path.trim_start_matches('/'))
}

/// Writes to a file until the disk takes no more.
///
/// # Errors
/// The file cannot be made.
pub fn fill_disk(path: &Path) -> Result<()> {
    let mut file = File::create(path)?;
    while file.write_all(&[0; 4096]).is_ok() {}
    Ok(())
}
