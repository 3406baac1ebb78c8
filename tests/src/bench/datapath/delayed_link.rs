//! A link that is far: forwards UDP packets between an agent and a server, each some time after it
//! came. Loses and reorders nothing.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Hidden first argument: this process is a link that is far.
pub(in crate::bench) const DELAY_PROCESS: &str = "--datapath-delay";

/// Packets in transfer in one direction; more are dropped, as by any link.
const PACKETS_IN_FLIGHT_MAX: usize = 65_536;

/// Longer than any packet of ours.
const PACKET_BYTES_MAX: usize = 65_536;

/// A far link to a server, in a process of its own.
#[derive(Debug)]
pub(super) struct DelayedLink {
    child: Child,
    pub(super) address: String,
}

impl DelayedLink {
    /// A link that takes `delay` in each direction.
    pub(super) fn start(server: &str, delay: Duration) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([DELAY_PROCESS, server, &delay.as_micros().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("standard output is piped")?;
        let mut address = String::new();
        BufReader::new(stdout).read_line(&mut address)?;
        Ok(Self {
            child,
            address: address.trim().to_owned(),
        })
    }
}

impl Drop for DelayedLink {
    fn drop(&mut self) {
        // It ends with its standard input.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Forwards until standard input ends. Arguments: server, delay in microseconds.
pub(in crate::bench) fn run_delay_process(arguments: &[String]) -> Result<()> {
    let [server, delay] = arguments else {
        bail!("a link needs a server and a delay");
    };
    let (server, delay) = (server.parse()?, Duration::from_micros(delay.parse()?));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    runtime.block_on(forward_packets(server, delay))
}

async fn forward_packets(server: SocketAddr, delay: Duration) -> Result<()> {
    let near = Arc::new(UdpSocket::bind("127.0.0.1:0").await?);
    println!("{}", near.local_addr()?);
    std::io::stdout().flush()?;
    let mut callers: HashMap<SocketAddr, mpsc::Sender<(Instant, Vec<u8>)>> = HashMap::new();
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    loop {
        let (length, caller) = near.recv_from(&mut buffer).await?;
        let due = now() + delay;
        let there = match callers.entry(caller) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let far = Arc::new(UdpSocket::bind("127.0.0.1:0").await?);
                far.connect(server).await?;
                let back = spawn_sender(near.clone(), Some(caller));
                tokio::spawn(receive_packets(far.clone(), delay, back));
                new.insert(spawn_sender(far, None))
            }
        };
        // A full link drops, as any does.
        let _ = there.try_send((due, buffer[..length].to_vec()));
    }
}

async fn receive_packets(
    far: Arc<UdpSocket>,
    delay: Duration,
    back: mpsc::Sender<(Instant, Vec<u8>)>,
) {
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    // A server that is gone refuses packets, and may come back.
    loop {
        if let Ok(length) = far.recv(&mut buffer).await {
            let _ = back.try_send((now() + delay, buffer[..length].to_vec()));
        }
    }
}

/// Sends each packet when it is due.
fn spawn_sender(by: Arc<UdpSocket>, to: Option<SocketAddr>) -> mpsc::Sender<(Instant, Vec<u8>)> {
    let (sender, mut waiting) = mpsc::channel::<(Instant, Vec<u8>)>(PACKETS_IN_FLIGHT_MAX);
    tokio::spawn(async move {
        while let Some((due, packet)) = waiting.recv().await {
            // The timer is no finer than a millisecond: the last part is waited for by yielding.
            while now() < due {
                if due - now() > Duration::from_millis(2) {
                    tokio::time::sleep_until(due - Duration::from_millis(2)).await;
                } else {
                    tokio::task::yield_now().await;
                }
            }
            let _ = match to {
                Some(to) => by.send_to(&packet, to).await,
                None => by.send(&packet).await,
            };
        }
    });
    sender
}

fn now() -> Instant {
    Instant::now()
}
