//! Network name spaces on one bridge: links are cut both ways or one way, between any of them, and
//! lose packets. `cluster.rs` starts the servers in them. Needs root.
//!
//! Name spaces have no names on this machine: they end with the last process and the last file that
//! holds them, so nothing is left even where a test is killed.

mod cluster;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sched::{CloneFlags, setns, unshare};

pub use self::cluster::{NamespaceCluster, SCHEDULER_HOST};
use crate::printed_text;

/// The network of all name spaces, and of nothing else.
const NETWORK_PREFIX: &str = "10.77.0";

/// Each name space has this link to the bridge.
const LINK_NAME: &str = "eth0";

/// Why name spaces and rules cannot be made here, if so.
pub fn namespace_obstacle() -> Option<String> {
    let tried = Network::new().and_then(|mut network| {
        network.add_host("a")?;
        network.add_host("b")?;
        network.block_packets(&["a"], &["b"])?;
        network.restore_packets()
    });
    tried.err().map(|error| format!("{error:#}"))
}

/// Name spaces on one bridge, and the blocked links between them.
#[derive(Debug)]
pub struct Network {
    bridge_namespace: File,
    hosts: BTreeMap<String, NetworkHost>,
    /// Packets of the first do not arrive at the second.
    blocked_pairs: BTreeSet<(String, String)>,
    /// So many of a hundred packets do not arrive at these.
    packet_loss_percent: BTreeMap<String, u32>,
}

#[derive(Debug)]
struct NetworkHost {
    namespace: File,
    number: usize,
}

impl Network {
    /// A bridge without links.
    ///
    /// # Errors
    /// The missing permission.
    pub fn new() -> Result<Self> {
        let bridge = new_namespace()?;
        run_in_namespace(&bridge, || {
            run_ip(&["link", "add", "bridge", "type", "bridge"])?;
            run_ip(&["link", "set", "bridge", "up"])
        })?;
        Ok(Self {
            bridge_namespace: bridge,
            hosts: BTreeMap::new(),
            blocked_pairs: BTreeSet::new(),
            packet_loss_percent: BTreeMap::new(),
        })
    }

    /// Adds a name space with a link to the bridge; its address is [`Self::address`].
    ///
    /// # Errors
    /// The missing permission.
    pub fn add_host(&mut self, name: &str) -> Result<()> {
        let host = NetworkHost {
            namespace: new_namespace()?,
            number: self.hosts.len() + 1,
        };
        let link = format!("v{}", host.number);
        // The tool takes a path in the place of the name that this name space does not have.
        let space = format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            host.namespace.as_raw_fd()
        );
        let peer = ["peer", "name", LINK_NAME, "netns", &space];
        run_in_namespace(&self.bridge_namespace, || {
            run_ip(&[&["link", "add", &link, "type", "veth"], &peer[..]].concat())?;
            run_ip(&["link", "set", &link, "master", "bridge", "up"])
        })?;
        let address = format!("{NETWORK_PREFIX}.{}/24", host.number);
        run_in_namespace(&host.namespace, || {
            run_ip(&["address", "add", &address, "dev", LINK_NAME])?;
            run_ip(&["link", "set", "lo", "up"])?;
            run_ip(&["link", "set", LINK_NAME, "up"])
        })?;
        self.hosts.insert(name.to_owned(), host);
        Ok(())
    }

    /// Names of all, in order.
    pub fn host_names(&self) -> impl Iterator<Item = &str> {
        self.hosts.keys().map(String::as_str)
    }

    /// The address of a name space.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn address(&self, name: &str) -> Result<String> {
        Ok(format!("{NETWORK_PREFIX}.{}", self.find_host(name)?.number))
    }

    /// Starts a program there.
    ///
    /// # Errors
    /// When it does not start, or there is no such name space.
    pub fn spawn_in_host(&self, name: &str, command: &mut Command) -> Result<ChildGuard> {
        let child = run_in_namespace(&self.find_host(name)?.namespace, || Ok(command.spawn()?))?;
        Ok(ChildGuard(child))
    }

    /// Takes the link of a name space away: nothing goes in or out.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn cut_link(&self, name: &str) -> Result<()> {
        self.set_link(name, "down")
    }

    /// Gives a link back that `Self::cut` took.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn restore_link(&self, name: &str) -> Result<()> {
        self.set_link(name, "up")
    }

    fn set_link(&self, name: &str, state: &str) -> Result<()> {
        let link = format!("v{}", self.find_host(name)?.number);
        run_in_namespace(&self.bridge_namespace, || {
            run_ip(&["link", "set", &link, state])
        })
    }

    /// No packet of these arrives at those any more; the other way packets pass.
    ///
    /// # Errors
    /// When there is none of such a name.
    pub fn block_packets(&mut self, sources: &[&str], targets: &[&str]) -> Result<()> {
        for &target in targets {
            let others = sources.iter().filter(|source| **source != target);
            let blocked = others.map(|source| ((*source).to_owned(), target.to_owned()));
            self.blocked_pairs.extend(blocked);
            self.apply_rules(target)?;
        }
        Ok(())
    }

    /// No packet passes between these and those any more, in neither direction.
    ///
    /// # Errors
    /// When there is none of such a name.
    pub fn partition(&mut self, some: &[&str], others: &[&str]) -> Result<()> {
        self.block_packets(some, others)?;
        self.block_packets(others, some)
    }

    /// So many of a hundred packets to a name space are lost from now on.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn set_packet_loss(&mut self, name: &str, percent: u32) -> Result<()> {
        self.packet_loss_percent.insert(name.to_owned(), percent);
        self.apply_rules(name)
    }

    /// All packets arrive again; a link that was cut stays so.
    ///
    /// # Errors
    /// The rules cannot be changed.
    pub fn restore_packets(&mut self) -> Result<()> {
        self.blocked_pairs.clear();
        self.packet_loss_percent.clear();
        self.host_names()
            .try_for_each(|name| self.apply_rules(name))
    }

    /// Packets of these arrive at those again.
    ///
    /// # Errors
    /// The rules cannot be changed.
    pub fn unblock_packets(&mut self, sources: &[&str], targets: &[&str]) -> Result<()> {
        self.blocked_pairs.retain(|(source, target)| {
            !(sources.contains(&source.as_str()) && targets.contains(&target.as_str()))
        });
        targets.iter().try_for_each(|name| self.apply_rules(name))
    }

    fn apply_rules(&self, target: &str) -> Result<()> {
        let here = |(_, at): &&(String, String)| at == target;
        let mut drops = String::new();
        for (source, _) in self.blocked_pairs.iter().filter(here) {
            drops += &format!("ip saddr {} drop;\n", self.address(source)?);
        }
        if let Some(percent) = self.packet_loss_percent.get(target) {
            // The tool takes no number that is not smaller than the modulus.
            let some = format!("numgen random mod 100 < {percent}");
            let which = if *percent < 100 { &some } else { "" };
            drops += &format!("iifname {LINK_NAME} {which} drop;\n");
        }
        // Created and removed first, so that the removal never fails; all at once.
        let rules = format!(
            "table ip cut {{}}\ndelete table ip cut\ntable ip cut {{\nchain arriving {{\n\
             type filter hook input priority 0;\n{drops}}}\n}}\n"
        );
        run_in_namespace(&self.find_host(target)?.namespace, || {
            apply_nft_rules(&rules)
        })
    }

    fn find_host(&self, name: &str) -> Result<&NetworkHost> {
        let host = self.hosts.get(name);
        host.with_context(|| format!("there is no name space '{name}'"))
    }
}

/// A program that is killed on drop.
#[derive(Debug)]
pub struct ChildGuard(Child);

impl Deref for ChildGuard {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for ChildGuard {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A network name space that lives as long as this file or a process in it.
fn new_namespace() -> Result<File> {
    let made = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).context("no network name space can be made")?;
        Ok(File::open("/proc/thread-self/ns/net")?)
    });
    made.join().map_err(|_| anyhow!("a thread panicked"))?
}

/// Does something in a name space, on a thread that ends with it.
fn run_in_namespace<T: Send>(space: &File, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            setns(space, CloneFlags::CLONE_NEWNET)?;
            act()
        });
        acting.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

fn run_ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output();
    let output = output.context("ip does not start")?;
    ensure!(
        output.status.success(),
        "ip {arguments:?}: {}",
        printed_text(&output)
    );
    Ok(())
}

fn apply_nft_rules(rules: &str) -> Result<()> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("nft does not start")?;
    let mut stdin = child.stdin.take().context("standard input is piped")?;
    stdin.write_all(rules.as_bytes())?;
    drop(stdin);
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "nft {rules}: {}",
        printed_text(&output)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_connectivity(network: &Network, source: &str, target: &str) -> bool {
        // A packet to an unused port is refused; a lost packet is not.
        let address = network.address(target).unwrap();
        let script = format!("exec 3<>/dev/tcp/{address}/9");
        let mut command = Command::new("timeout");
        command
            .args(["1", "bash", "-c", &script])
            .stderr(Stdio::null());
        let status = network
            .spawn_in_host(source, &mut command)
            .unwrap()
            .wait()
            .unwrap();
        status.code() != Some(124)
    }

    #[test]
    fn cluster_links_are_cut_and_mended() {
        if let Some(reason) = namespace_obstacle() {
            return crate::report_skip("cluster_links_are_cut_and_mended", &reason);
        }
        let mut network = Network::new().unwrap();
        for name in ["a", "b", "c"] {
            network.add_host(name).unwrap();
        }
        assert!(has_connectivity(&network, "a", "b") && has_connectivity(&network, "c", "b"));
        network.block_packets(&["b"], &["a"]).unwrap();
        assert!(!has_connectivity(&network, "a", "b") && has_connectivity(&network, "c", "b"));
        network.restore_packets().unwrap();
        network.partition(&["a"], &["b", "c"]).unwrap();
        assert!(!has_connectivity(&network, "a", "c") && has_connectivity(&network, "b", "c"));
        network.restore_packets().unwrap();
        network.cut_link("b").unwrap();
        assert!(!has_connectivity(&network, "a", "b") && has_connectivity(&network, "a", "c"));
        network.restore_link("b").unwrap();
        network.set_packet_loss("b", 100).unwrap();
        assert!(!has_connectivity(&network, "a", "b"));
        network.restore_packets().unwrap();
        assert!(has_connectivity(&network, "a", "b"));
    }
}
