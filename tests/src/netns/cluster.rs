//! A cluster whose catalog, home, nodes and scheduler live in a network name space each. Cuts no
//! link by itself.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::{ChildGuard, Network, run_in_namespace};
use crate::{bafs_program, printed_text};

/// Where `bafs run` and the other commands of a user live.
pub const SCHEDULER_HOST: &str = "scheduler";

/// A server may take so long to end when it is asked to.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug)]
struct ClusterServer {
    args: Vec<String>,
    process: ChildGuard,
}

/// A cluster of which each server, and the scheduler, has a name space of its own.
#[derive(Debug)]
pub struct NamespaceCluster {
    /// Servers by name. Dropped first: they end before their files go.
    servers: BTreeMap<String, ClusterServer>,
    /// Where they live: `catalog`, `home`, `n1`, `n2`, … and [`SCHEDULER_HOST`].
    pub network: Network,
    addresses: BTreeMap<String, String>,
    /// The directory of `bafs://home/`.
    pub home: TempDir,
    /// Stores (`n1`, …), logs (`n1.log`, …) and the identity.
    pub directory: TempDir,
}

impl NamespaceCluster {
    /// Starts catalog, home and nodes `n1`, `n2`, … of these sizes, with so many slots each.
    ///
    /// # Errors
    /// The missing permission, or a server that does not start.
    pub fn start(node_sizes: &[&str], slots: u32) -> Result<Self> {
        let mut cluster = Self {
            servers: BTreeMap::new(),
            network: Network::new()?,
            addresses: BTreeMap::new(),
            home: tempfile::tempdir()?,
            directory: tempfile::tempdir()?,
        };
        cluster.network.add_host(SCHEDULER_HOST)?;
        let identity = cluster.identity_directory();
        let made = Command::new(bafs_program())
            .arg("init")
            .arg(&identity)
            .output()?;
        ensure!(made.status.success(), "bafs init: {}", printed_text(&made));
        cluster.add_server("catalog", &["catalog"])?;
        let export = cluster.home.path().to_string_lossy().into_owned();
        let catalog = cluster.server_address("catalog")?.to_owned();
        let home = ["home", "--export", &export, "--catalog", &catalog];
        cluster.add_server("home", &home)?;
        for (at, size) in node_sizes.iter().enumerate() {
            let slots = slots.to_string();
            cluster.add_node(
                &format!("n{}", at + 1),
                &["--size", size, "--slots", &slots],
            )?;
        }
        cluster.wait_for_servers(node_sizes.len() + 1)?;
        Ok(cluster)
    }

    /// Starts another node, with further words of its command line.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn add_node(&mut self, name: &str, more: &[&str]) -> Result<()> {
        let store = self.store_path(name).to_string_lossy().into_owned();
        let catalog = self.server_address("catalog")?.to_owned();
        let own = [
            "node",
            "--store",
            &store,
            "--name",
            name,
            "--catalog",
            &catalog,
        ];
        self.add_server(name, &[&own, more].concat())
    }

    /// Starts a server in a new name space of its name.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn add_server(&mut self, name: &str, args: &[&str]) -> Result<()> {
        self.network.add_host(name)?;
        let mut args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        args.extend([
            "--listen".to_owned(),
            format!("{}:0", self.network.address(name)?),
        ]);
        self.start_server(name, args)
    }

    fn start_server(&mut self, name: &str, mut args: Vec<String>) -> Result<()> {
        let log = self.log_path(name);
        let mut command = Command::new(bafs_program());
        command.arg("--json").args(&args);
        command.arg("--identity").arg(self.identity_directory());
        command.arg("--until-stdin-closes");
        command.env_remove("BAFS_LISTEN").env_remove("BAFS_METRICS");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(OpenOptions::new().create(true).append(true).open(&log)?);
        let mut running = self.network.spawn_in_host(name, &mut command)?;
        let stdout = running.stdout.take().context("standard output is piped")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let told: Option<serde_json::Value> = serde_json::from_str(&line).ok();
        let address = told.and_then(|told| told["listening"].as_str().map(str::to_owned));
        let Some(address) = address else {
            let why = std::fs::read_to_string(&log).unwrap_or_default();
            bail!("{name} did not start: {}", why.trim());
        };
        // Where it is started again it is at the same address.
        if let Some(listen) = args.iter().position(|arg| arg == "--listen") {
            args[listen + 1].clone_from(&address);
        }
        self.addresses.insert(name.to_owned(), address);
        self.servers.insert(
            name.to_owned(),
            ClusterServer {
                args,
                process: running,
            },
        );
        Ok(())
    }

    /// Where a server listens, `host:port`.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn server_address(&self, name: &str) -> Result<&str> {
        let address = self.addresses.get(name);
        Ok(address.with_context(|| format!("there is no server '{name}'"))?)
    }

    /// The store of a node.
    pub fn store_path(&self, node: &str) -> PathBuf {
        self.directory.path().join(node)
    }

    /// A server's output.
    pub fn log_path(&self, server: &str) -> PathBuf {
        self.directory.path().join(format!("{server}.log"))
    }

    /// The identity of all.
    pub fn identity_directory(&self) -> PathBuf {
        self.directory.path().join("identity")
    }

    /// Kills a server as a power cut would; its address and its store stay for a restart.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn kill(&mut self, name: &str) -> Result<()> {
        let server = self.find_server(name)?;
        server.process.kill()?;
        server.process.wait()?;
        Ok(())
    }

    /// Starts a killed server again at its address.
    ///
    /// # Errors
    /// When there is none of that name, or it does not start.
    pub fn restart(&mut self, name: &str) -> Result<()> {
        let args = self.find_server(name)?.args.clone();
        self.start_server(name, args)
    }

    /// Sends a signal to a server.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn send_signal(&mut self, name: &str, signal: Signal) -> Result<()> {
        let pid = self.find_server(name)?.process.id();
        Ok(kill(Pid::from_raw(i32::try_from(pid)?), signal)?)
    }

    fn find_server(&mut self, name: &str) -> Result<&mut ClusterServer> {
        let server = self.servers.get_mut(name);
        server.with_context(|| format!("there is no server '{name}'"))
    }

    /// A `bafs` command of a user of this cluster; to be started by [`Network::spawn_in_host`].
    ///
    /// # Errors
    /// There is no catalog.
    pub fn bafs_command(&self, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(bafs_program());
        command
            .args(args)
            .env("BAFS_IDENTITY", self.identity_directory())
            .env("BAFS_CATALOG", self.server_address("catalog")?)
            .stdin(Stdio::null());
        Ok(command)
    }

    /// Runs a command in the scheduler's name space to its end.
    ///
    /// # Errors
    /// When it does not start.
    pub fn run_command(&self, args: &[&str]) -> Result<Output> {
        let mut command = self.bafs_command(args)?;
        run_in_namespace(&self.network.find_host(SCHEDULER_HOST)?.namespace, || {
            Ok(command.output()?)
        })
    }

    /// Runs a command that must succeed, and returns its JSON.
    ///
    /// # Errors
    /// The command's error output.
    pub fn run_json(&self, args: &[&str]) -> Result<serde_json::Value> {
        let output = self.run_command(&[args, &["--json"]].concat())?;
        ensure!(
            output.status.success(),
            "bafs {args:?}: {}",
            printed_text(&output)
        );
        serde_json::from_slice(&output.stdout).with_context(|| printed_text(&output))
    }

    /// Starts `bafs run` in the scheduler's name space and appends its output to a file.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_run(&self, workflow: &Path, more: &[&str], told: &Path) -> Result<ChildGuard> {
        let workflow = workflow.to_string_lossy();
        let mut command = self.bafs_command(&[&["run", &workflow], more].concat())?;
        let told = OpenOptions::new().create(true).append(true).open(told)?;
        command.stdout(told.try_clone()?).stderr(told);
        self.network.spawn_in_host(SCHEDULER_HOST, &mut command)
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
                .is_some_and(|listed| listed.len() == count)
            {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        bail!("the catalog does not list {count} servers")
    }

    /// Writes a file at home.
    ///
    /// # Errors
    /// An I/O error.
    pub fn write_home(&self, path: &str, content: &[u8]) -> Result<PathBuf> {
        let path = self.home.path().join(path);
        std::fs::create_dir_all(path.parent().context("a file has a directory")?)?;
        std::fs::write(&path, content)?;
        Ok(path)
    }

    /// Reads a file at home.
    ///
    /// # Errors
    /// An I/O error, with the path.
    pub fn read_home(&self, path: &str) -> Result<Vec<u8>> {
        let path = self.home.path().join(path);
        std::fs::read(&path).with_context(|| path.display().to_string())
    }
}

impl Drop for NamespaceCluster {
    /// Stops servers in order, so that their mounts end; kills a server that does not stop in time.
    fn drop(&mut self) {
        for server in self.servers.values_mut() {
            drop(server.process.stdin.take());
            if let Ok(pid) = i32::try_from(server.process.id()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
                let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
            }
        }
        let pause = Duration::from_millis(20);
        for server in self.servers.values_mut() {
            let mut waited = Duration::ZERO;
            while matches!(server.process.try_wait(), Ok(None)) && waited < STOP_TIMEOUT {
                std::thread::sleep(pause);
                waited += pause;
            }
        }
        self.servers.clear();
    }
}
