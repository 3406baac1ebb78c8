//! A throw-away cluster on this machine: separate processes on loopback, gone with this one.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bafs_proto::net::channel;
use bafs_server::executor::{DiskSpace, TemporaryQuota, machine_memory_bytes};
use bafs_server::{clock, home_server};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::init;
use crate::locked_directory::{LockedDirectory, explain_full_disk};
use crate::units::parse_bytes;

/// Tokens of a throw-away cluster are good for a week: longer than any demo.
const TOKEN_LIFETIME_MS: u64 = 7 * 24 * 3600 * 1000;

/// Time for a process to end, or to stop, when it is asked to.
const STOP_TIMEOUT_MS: u64 = 3_000;

/// The first port for servers: those below are for services that have names.
const PORT_MIN: u32 = 10_000;
/// The first port of outgoing connections where the kernel does not say it (its default).
const EPHEMERAL_PORT_MIN: u32 = 32_768;
/// Ports that are tried for a server, and the distance of clusters.
const PORTS_PER_CLUSTER: u32 = 97;

/// What the cluster shall be.
#[derive(Debug, Clone)]
pub struct ClusterSpec {
    /// The `bafs` program.
    pub program: PathBuf,
    /// Directory that the home exports.
    pub export: PathBuf,
    /// Rate of the link to home, as on the command line.
    pub home_rate: Option<String>,
    /// Size of each node, as on the command line.
    pub node_sizes: Vec<String>,
    /// Jobs that each node runs at once.
    pub slots: u32,
    /// Address of this machine for servers, where nodes elsewhere shall reach them.
    pub listen_host: Option<String>,
    /// Every server publishes figures for Prometheus on loopback.
    pub has_metrics: bool,
    /// Keep the directory at the end.
    pub is_kept: bool,
}

/// A running cluster. Dropping it ends every process and removes every file.
#[derive(Debug)]
pub struct Cluster {
    program: PathBuf,
    has_metrics: bool,
    export: PathBuf,
    listen_host: Option<String>,
    /// Whether this cluster is why the home's own directory is in the export.
    made_home_state: bool,
    processes: Vec<Process>,
    directory: LockedDirectory,
}

#[derive(Debug)]
struct Process {
    name: String,
    args: Vec<String>,
    address: String,
    metrics_address: String,
    child: Child,
}

impl Cluster {
    /// Starts home, catalog and nodes `n1`, `n2`, …, and waits until each listens.
    ///
    /// # Errors
    /// A process that does not start, with what it said.
    pub fn start(spec: &ClusterSpec) -> Result<Self> {
        let directory = LockedDirectory::create("cluster", spec.is_kept)?;
        init::create_identities(
            &directory.path().join("identity"),
            clock::now().plus_ms(TOKEN_LIFETIME_MS),
        )
        .map_err(|error| explain_full_disk(directory.path(), error))?;
        let home_state = spec.export.join(home_server::OWN_DIRECTORY);
        let mut cluster = Self {
            program: spec.program.clone(),
            has_metrics: spec.has_metrics,
            export: spec.export.clone(),
            listen_host: spec.listen_host.clone(),
            made_home_state: !home_state.exists(),
            processes: Vec::new(),
            directory,
        };
        match cluster.start_servers(spec) {
            Ok(()) => Ok(cluster),
            // Its files are still there: they may be what fills the disk.
            Err(error) => Err(explain_full_disk(cluster.directory(), error)),
        }
    }

    fn start_servers(&mut self, spec: &ClusterSpec) -> Result<()> {
        self.spawn_server("catalog", vec!["catalog".to_owned()])?;
        let catalog = self.catalog_address().to_owned();
        let export = path_text(&spec.export)?;
        let mut home = to_strings(&["home", "--export", &export, "--catalog", &catalog]);
        if let Some(limit) = &spec.home_rate {
            home.extend(to_strings(&["--rate-limit", limit]));
        }
        self.spawn_server("home", home)?;
        let slots = spec.slots.to_string();
        let share = slot_temporary_space(spec, self.directory.path())?;
        let (tmp, memory) = (
            format!("{} B", share.bytes),
            format!("{} B", share.memory_bytes),
        );
        // They are on one machine.
        let nodes = spec.node_sizes.len().max(1) as u64;
        let attribute = format!("memory_bytes={}", machine_memory_bytes() / nodes);
        for (index, size) in spec.node_sizes.iter().enumerate() {
            let name = format!("n{}", index + 1);
            let store = path_text(&self.directory.path().join(&name))?;
            let mut args =
                to_strings(&["node", "--store", &store, "--size", size, "--name", &name]);
            args.extend(to_strings(&["--slots", &slots, "--catalog", &catalog]));
            args.extend(to_strings(&["--tmp", &tmp, "--shared-memory", &memory]));
            args.extend(to_strings(&["--attribute", &attribute]));
            self.spawn_server(&name, args)?;
        }
        Ok(())
    }

    /// Starts another node, with further words of its command line.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub fn add_node(&mut self, name: &str, more: &[&str]) -> Result<()> {
        let store = path_text(&self.directory.path().join(name))?;
        let catalog = self.catalog_address().to_owned();
        let mut args = to_strings(&["node", "--store", &store, "--name", name]);
        args.extend(to_strings(&["--catalog", &catalog]));
        args.extend(to_strings(more));
        self.spawn_server(name, args)
    }

    /// Address of the catalog.
    pub fn catalog_address(&self) -> &str {
        self.address("catalog")
    }

    /// Address of the home server.
    pub fn home_address(&self) -> &str {
        self.address("home")
    }

    /// Directory that the home exports.
    pub fn export(&self) -> &Path {
        &self.export
    }

    /// Address of a process; empty when there is none of that name.
    pub fn address(&self, name: &str) -> &str {
        self.processes
            .iter()
            .find(|p| p.name == name)
            .map_or("", |p| &p.address)
    }

    /// Address of a process' metrics; empty when there are none.
    pub fn metrics_address(&self, name: &str) -> &str {
        self.processes
            .iter()
            .find(|p| p.name == name)
            .map_or("", |p| &p.metrics_address)
    }

    /// Process id of a process.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn pid(&self, name: &str) -> Result<u32> {
        let process = self.processes.iter().find(|p| p.name == name);
        Ok(process
            .with_context(|| format!("no process '{name}'"))?
            .child
            .id())
    }

    /// Directory of the identities.
    pub fn identity(&self) -> PathBuf {
        self.directory.path().join("identity")
    }

    /// Its files outlive it.
    ///
    /// # Errors
    /// An I/O error: then they go with it.
    pub fn keep_files(&mut self) -> Result<()> {
        self.directory.keep_files()
    }

    /// The cluster's directory: stores (`n1`, …), logs (`n1.log`, …) and identities are in it.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Sends a signal to a process. After `SIGSTOP` it returns when the process is stopped.
    ///
    /// # Errors
    /// When there is none of that name, or it does not stop.
    pub fn signal(&self, name: &str, signal: Signal) -> Result<()> {
        let pid = self.pid(name)?;
        kill(Pid::from_raw(i32::try_from(pid)?), signal)?;
        let mut waited_ms = 0;
        // The thread that takes the signal stops the others, and it has to be scheduled first.
        while signal == Signal::SIGSTOP && !is_stopped(pid)? {
            ensure!(waited_ms < STOP_TIMEOUT_MS, "{name} does not stop");
            std::thread::sleep(Duration::from_millis(1));
            waited_ms += 1;
        }
        Ok(())
    }

    /// Kills a process as a power cut would; its address and directory stay for a restart.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn kill(&mut self, name: &str) -> Result<()> {
        let process = self.processes.iter_mut().find(|p| p.name == name);
        let process = process.with_context(|| format!("no process '{name}'"))?;
        process.child.kill()?;
        process.child.wait()?;
        Ok(())
    }

    /// Starts a killed process again at its address.
    ///
    /// # Errors
    /// When there is none of that name, or it does not start.
    pub fn restart(&mut self, name: &str) -> Result<()> {
        let index = self.processes.iter().position(|p| p.name == name);
        let old = self
            .processes
            .remove(index.with_context(|| format!("no process '{name}'"))?);
        let mut args = old.args;
        if !args.iter().any(|arg| arg == "--listen") {
            args.extend(to_strings(&["--listen", &old.address]));
        }
        self.spawn_server(name, args)
    }

    /// A restarted server listens where it did.
    fn listen_arguments(&self, args: &[String]) -> Vec<String> {
        if args.iter().any(|arg| arg == "--listen") {
            return Vec::new();
        }
        let host = self.listen_host.as_deref().unwrap_or("127.0.0.1");
        vec!["--listen".to_owned(), choose_address(host)]
    }

    fn spawn_server(&mut self, name: &str, args: Vec<String>) -> Result<()> {
        let log = self.directory.path().join(format!("{name}.log"));
        let identity = path_text(&self.identity())?;
        let metrics: &[&str] = if self.has_metrics {
            &["--metrics", "127.0.0.1:0"]
        } else {
            &[]
        };
        let mut child = Command::new(&self.program)
            .arg("--json")
            .args(&args)
            .args(metrics)
            .args(self.listen_arguments(&args))
            .args(["--identity", &identity, "--until-stdin-closes"])
            // Where this process was told nothing its environment is theirs.
            .envs(channel::configured_channel().map(|channel| ("BAFS_CHANNEL", channel.name())))
            // These are for one server of the user's own cluster; all of this one would take them.
            .env_remove("BAFS_LISTEN")
            .env_remove("BAFS_METRICS")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::options().create(true).append(true).open(&log)?)
            // Ctrl-C is for the command that owns the cluster; it ends the servers in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let stdout = child.stdout.take().context("standard output is piped")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let said: Option<serde_json::Value> = serde_json::from_str(&line).ok();
        let text = |name: &str| {
            let said = said.as_ref().and_then(|said| said[name].as_str());
            said.map(str::to_owned)
        };
        let address = text("listening");
        let process = Process {
            name: name.to_owned(),
            args,
            address: address.clone().unwrap_or_default(),
            metrics_address: text("metrics").unwrap_or_default(),
            child,
        };
        self.processes.push(process);
        if address.is_none() {
            let why = std::fs::read_to_string(&log).unwrap_or_default();
            bail!("{name} did not start: {}", why.trim());
        }
        Ok(())
    }
}

/// An address that no connection out of this machine takes while its server is being restarted:
/// the kernel gives those the ports from a bound upwards.
fn choose_address(host: &str) -> String {
    let bound = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok();
    let bound = bound.and_then(|range| range.split_whitespace().next()?.parse().ok());
    let count = bound.unwrap_or(EPHEMERAL_PORT_MIN).saturating_sub(PORT_MIN);
    // Clusters beside each other begin at ports of their own.
    let first = std::process::id() * PORTS_PER_CLUSTER;
    let mut ports = (0..PORTS_PER_CLUSTER)
        .filter_map(|step| Some(PORT_MIN + (first + step).checked_rem(count)?));
    let port = ports.find(|&port| {
        u16::try_from(port).is_ok_and(|port| {
            TcpListener::bind((host, port)).is_ok() && UdpSocket::bind((host, port)).is_ok()
        })
    });
    format!("{host}:{}", port.unwrap_or(0))
}

/// Whether all threads of a process are stopped (proc(5), the state in `task/*/stat`).
fn is_stopped(pid: u32) -> Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may have ended since.
        let stat = std::fs::read_to_string(thread?.path().join("stat")).unwrap_or_default();
        let state = stat.rsplit_once(')').map(|(_, fields)| fields.trim_start());
        if state.is_some_and(|state| !state.starts_with('T')) {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // Closing standard input asks as well, and is what a crash of this process does.
            drop(process.child.stdin.take());
            if let Ok(pid) = i32::try_from(process.child.id()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
                let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
            }
        }
        for process in &mut self.processes {
            let mut waited_ms = 0;
            while matches!(process.child.try_wait(), Ok(None)) && waited_ms < STOP_TIMEOUT_MS {
                std::thread::sleep(Duration::from_millis(20));
                waited_ms += 20;
            }
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
        if self.made_home_state {
            // Receipts are for clusters that outlive a run; the export is the user's directory.
            // Another home may have come to it meanwhile, and then they are that one's.
            let _ = home_server::remove_unused_directory(&self.export);
        }
    }
}

fn to_strings(text: &[&str]) -> Vec<String> {
    text.iter().map(|word| (*word).to_owned()).collect()
}

/// What each slot has for temporary files: all nodes are on one disk and in one memory.
fn slot_temporary_space(spec: &ClusterSpec, directory: &Path) -> Result<TemporaryQuota> {
    let sizes = spec.node_sizes.iter().map(|size| parse_bytes(size));
    let offered = sizes.sum::<Result<u64>>().context("the size of a node")?;
    let nodes = u32::try_from(spec.node_sizes.len())?;
    let slots = nodes.saturating_mul(spec.slots);
    let disk = DiskSpace::measure(directory).context("cannot inspect the disk")?;
    let share = TemporaryQuota::beside_volumes_quota(disk, offered, offered, slots);
    Ok(share)
}

fn path_text(path: &Path) -> Result<String> {
    path.to_str()
        .map(str::to_owned)
        .with_context(|| format!("{} is not valid text (UTF-8)", path.display()))
}
