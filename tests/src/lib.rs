//! Common parts of whole-system tests: clusters of real processes, the program, and visible skips.

pub mod api;
pub mod batch_systems;
pub mod bench;
pub mod cache_cluster;
pub mod chaos;
pub mod content;
pub mod exec_job;
pub mod external_servers;
pub mod fault_injection;
pub mod many_volumes;
pub mod mounted_volume;
pub mod netns;
pub mod root_image;
pub mod seeded_rng;
pub mod small_disk;
pub mod uring;

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use bafs::cluster::{Cluster, ClusterSpec};
use tempfile::TempDir;

/// The `bafs` program: the one in `BAFS_BIN`, else the one built beside this test.
///
/// # Panics
/// When it has not been built.
pub fn bafs_program() -> PathBuf {
    let beside = || {
        let test = std::env::current_exe().expect("a test knows its own path");
        let target = test
            .ancestors()
            .nth(2)
            .expect("tests are two levels below the target");
        target.join("bafs")
    };
    let path = std::env::var_os("BAFS_BIN").map_or_else(beside, PathBuf::from);
    assert!(
        path.exists(),
        "{} is missing: cargo build --bin bafs",
        path.display()
    );
    path
}

/// Says aloud that a test was skipped; a skipped test is not a passed one.
pub fn report_skip(test: &str, reason: &str) {
    let line = format!("SKIPPED: {test}: {reason}");
    eprintln!("{line}");
    if let Some(log) = std::env::var_os("BAFS_SKIP_LOG") {
        let file = OpenOptions::new().create(true).append(true).open(log);
        let written = file.and_then(|mut file| writeln!(file, "{line}"));
        written.expect("the log of skipped tests can be written");
    }
}

/// Why jobs with mounts cannot run here, if they cannot.
pub fn mount_obstacle() -> Option<String> {
    let doctor = Command::new(bafs_program())
        .arg("doctor")
        .output()
        .expect("the program runs");
    // Any other finding allows jobs to run; another user's mount may be dead.
    let missing = doctor.status.code() == Some(1);
    missing.then(|| String::from_utf8_lossy(&doctor.stdout).into_owned())
}

/// Why the kernel does not read files by itself whose store is in this directory, if so.
pub fn passthrough_obstacle(directory: &Path) -> Option<&'static str> {
    const OVERLAYFS_MAGIC: i64 = 0x794c_7630;
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release
        .split('.')
        .map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let users = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_host_root =
        nix::unistd::geteuid().is_root() && users.split_whitespace().last() == Some("4294967295");
    if !is_host_root {
        Some("the kernel takes files of the machine's root only")
    } else if version < (6, 9) {
        Some("the kernel is older than 6.9")
    } else if rustix::fs::statfs(directory).is_ok_and(|found| found.f_type == OVERLAYFS_MAGIC) {
        Some("the store is itself on top of another file system")
    } else {
        None
    }
}

/// A cluster of real processes with a home directory of its own.
#[derive(Debug)]
pub struct TestCluster {
    /// The processes. Dropped first: servers end before their files go.
    pub cluster: Cluster,
    /// The directory of `bafs://home/`.
    pub home: TempDir,
}

impl TestCluster {
    /// Starts a cluster with nodes of the given sizes (such as `100MB`), two slots each.
    ///
    /// # Errors
    /// A process that does not start.
    pub fn start(node_sizes: &[&str]) -> Result<Self> {
        Self::start_with_home_rate(node_sizes, None)
    }

    /// Starts a cluster whose home is behind a link of the given rate (such as `1MB/s`).
    ///
    /// # Errors
    /// A process that does not start.
    pub fn start_with_home_rate(node_sizes: &[&str], limit: Option<&str>) -> Result<Self> {
        Self::start_with_spec(node_sizes, |spec| spec.home_rate = limit.map(str::to_owned))
    }

    /// Starts a cluster after `change` has changed its configuration.
    ///
    /// # Errors
    /// A process that does not start.
    pub fn start_with_spec(
        node_sizes: &[&str],
        change: impl FnOnce(&mut ClusterSpec),
    ) -> Result<Self> {
        let home = tempfile::tempdir()?;
        let mut spec = ClusterSpec {
            listen_host: None,
            program: bafs_program(),
            export: home.path().to_owned(),
            home_rate: None,
            node_sizes: node_sizes.iter().map(|&size| size.to_owned()).collect(),
            slots: 2,
            has_metrics: false,
            is_kept: false,
        };
        change(&mut spec);
        Ok(Self {
            cluster: Cluster::start(&spec)?,
            home,
        })
    }

    /// Writes a file at home.
    ///
    /// # Errors
    /// An I/O error.
    pub fn write_home(&self, path: &str, content: &[u8]) -> Result<()> {
        let path = self.home.path().join(path);
        std::fs::create_dir_all(path.parent().context("a file has a directory")?)?;
        Ok(std::fs::write(path, content)?)
    }

    /// Reads a file at home.
    ///
    /// # Errors
    /// An I/O error, with the path.
    pub fn read_home(&self, path: &str) -> Result<Vec<u8>> {
        let path = self.home.path().join(path);
        std::fs::read(&path).with_context(|| path.display().to_string())
    }

    /// A `bafs` command that talks to this cluster.
    pub fn bafs_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(bafs_program());
        command
            .args(args)
            .env("BAFS_IDENTITY", self.cluster.identity())
            .env("BAFS_CATALOG", self.cluster.catalog_address())
            .stdin(Stdio::null());
        command
    }

    /// Runs a command that must succeed, and returns its JSON.
    ///
    /// # Errors
    /// The command's error output.
    pub fn run_json(&self, args: &[&str]) -> Result<serde_json::Value> {
        let output = self.bafs_command(args).arg("--json").output()?;
        anyhow::ensure!(
            output.status.success(),
            "bafs {args:?}: {}",
            printed_text(&output)
        );
        serde_json::from_slice(&output.stdout).with_context(|| printed_text(&output))
    }

    /// Waits until the catalog lists so many servers.
    ///
    /// # Errors
    /// When it does not within 20 seconds.
    pub fn wait_for_servers(&self, count: usize) -> Result<()> {
        for _ in 0..200 {
            let listed = self.run_json(&["servers"])?;
            if listed
                .as_array()
                .is_some_and(|servers| servers.len() == count)
            {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        anyhow::bail!("the catalog does not list {count} servers")
    }

    /// Writes a workflow file and returns its path.
    ///
    /// # Errors
    /// An I/O error.
    pub fn write_workflow(&self, text: &str) -> Result<PathBuf> {
        let path = self.home.path().join("test.bafs");
        std::fs::write(&path, text)?;
        Ok(path)
    }
}

/// Everything that a command printed.
pub fn printed_text(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// A program that `cargo xtask test` builds for the tests, or one of that name on the `PATH`.
pub fn find_tool(name: &str) -> Option<PathBuf> {
    let own = std::env::var_os("BAFS_TOOLS").map(PathBuf::from);
    let beside = bafs_program().parent().map(|it| it.join("../tools/bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = own.into_iter().chain(beside);
    places
        .chain(std::env::split_paths(&path))
        .map(|place| place.join(name))
        .find(|path| path.is_file())
}

/// Processes whose command line contains a text, as `pid command line`.
///
/// # Panics
/// When /proc cannot be read.
pub fn processes_matching(text: &str) -> Vec<String> {
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")
        .expect("/proc is readable")
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == own || !name.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(text) {
            found.push(format!("{name} {line}"));
        }
    }
    found
}

/// Mount points of this name space whose line in the mount table contains a text.
///
/// # Panics
/// When the mount table cannot be read.
pub fn mounts_matching(text: &str) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/self/mounts").expect("the mount table is readable");
    table
        .lines()
        .filter(|line| line.contains(text))
        .map(str::to_owned)
        .collect()
}

/// Whether a directory is gone or empty.
pub fn is_gone_or_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).map_or(true, |mut entries| entries.next().is_none())
}
