//! Which transport carries calls: QUIC or TLS over TCP. Servers listen for both at one port number;
//! the client chooses.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;

use super::hello::resolve;
use super::quic::{QuicDialer, QuicListener};
use super::routes;
use super::tcp::{ConnectFailure, TlsTcpDialer, TlsTcpListener};
use super::{BoxFuture, Connection, Dial, Service};
use crate::error::{Error, ErrorCode, Result};
use crate::identity::Identity;
use crate::time::Deadline;

/// Longest time for a TCP connection to a server on a local network.
const TCP_CONNECT_TIMEOUT_MAX: Duration = Duration::from_millis(1_500);

/// Pause until TCP is tried again at a server that may be starting.
const TCP_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// How long a server that only QUIC reaches is not tried by TCP, in milliseconds.
const TCP_AVOIDED_MS: u64 = 60_000;

/// Ports to try when any will do: one of both kinds must be free.
const PORT_ATTEMPTS_MAX: u32 = 32;

/// Transport by which a process reaches servers (`--channel`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Channel {
    /// TCP to reachable servers on networks of this machine; otherwise QUIC.
    #[default]
    Auto,
    /// QUIC only; a server does not listen for TCP.
    Quic,
    /// TCP only.
    Tcp,
}

impl Channel {
    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Quic => "quic",
            Self::Tcp => "tcp",
        }
    }
}

static CONFIGURED_CHANNEL: OnceLock<Channel> = OnceLock::new();

/// Sets the channel of this process, once, before the first connection. The default is `Auto`.
pub fn set_channel(channel: Channel) {
    // The first word counts.
    let _ = CONFIGURED_CHANNEL.set(channel);
}

/// The channel that [`set_channel`] set, if any.
pub fn configured_channel() -> Option<Channel> {
    CONFIGURED_CHANNEL.get().copied()
}

/// How this process talks.
pub fn current_channel() -> Channel {
    configured_channel().unwrap_or_default()
}

/// Connects to servers over QUIC or TCP, according to the [`Channel`] of the process.
#[derive(Debug)]
pub struct Dialer {
    channel: Channel,
    identity: Identity,
    /// Made when needed: in most clusters TCP reaches all servers.
    quic: OnceCell<QuicDialer>,
    tcp: TlsTcpDialer,
    /// Servers that TCP does not reach, each with the end of the time for which this is assumed.
    tcp_unreachable: Mutex<BTreeMap<SocketAddr, Deadline>>,
}

impl Dialer {
    /// A dialer that shows `identity`, by the [`current_channel`] channel. Must be made within a
    /// runtime.
    ///
    /// # Errors
    /// `Malformed` when the identity is not usable, `ServerFault` when QUIC is the only channel and
    /// no socket can be had.
    pub fn new(identity: &Identity) -> Result<Self> {
        Self::with_channel(current_channel(), identity)
    }

    /// As [`Dialer::new`], by the given channel.
    ///
    /// # Errors
    /// As [`Dialer::new`].
    pub fn with_channel(channel: Channel, identity: &Identity) -> Result<Self> {
        let first = match channel {
            Channel::Quic => Some(QuicDialer::new(identity.clone())?),
            Channel::Auto | Channel::Tcp => None,
        };
        Ok(Self {
            channel,
            identity: identity.clone(),
            quic: OnceCell::new_with(first),
            tcp: TlsTcpDialer::new(identity)?,
            tcp_unreachable: Mutex::default(),
        })
    }

    async fn dial_quic(&self, address: &str, deadline: Deadline) -> Result<Connection> {
        let make = || async { QuicDialer::new(self.identity.clone()) };
        let quic = self.quic.get_or_try_init(make).await?;
        quic.dial(address, deadline).await
    }

    async fn dial_auto(&self, address: &str, deadline: Deadline) -> Result<Connection> {
        let target = tokio::time::timeout_at(deadline.instant().into(), resolve(address)).await;
        let silent = || Error::new(ErrorCode::Unreachable, format!("{address} does not answer"));
        let target = target.map_err(|_| silent())??;
        if !routes::is_directly_attached(target.ip()) || self.is_tcp_unreachable(target) {
            return self.dial_quic(address, deadline).await;
        }
        // Half of the time is reserved for the other channel: the peer that accepts a TCP
        // connection need not be the server, and a firewall may pass only the first packets.
        let within = TCP_CONNECT_TIMEOUT_MAX.min(deadline.remaining() / 4);
        let no_way = match self.tcp.connect(address, target, within).await {
            Ok(connection) => return Ok(connection),
            Err(why) => why,
        };
        let connected = self.dial_fallback(address, target, &no_way, deadline).await;
        connected.map_err(|error| match no_way.error.code {
            ErrorCode::PeerRefused => no_way.error,
            _ => Error::new(
                error.code,
                format!("{}; {}", error.detail, no_way.error.detail),
            ),
        })
    }

    /// Connects by QUIC; meanwhile by TCP again, if a server may just be starting there.
    async fn dial_fallback(
        &self,
        address: &str,
        target: SocketAddr,
        no_way: &ConnectFailure,
        deadline: Deadline,
    ) -> Result<Connection> {
        let again = async {
            loop {
                tokio::time::sleep(TCP_RETRY_PAUSE).await;
                if let Ok(connection) = self
                    .tcp
                    .connect(address, target, TCP_CONNECT_TIMEOUT_MAX)
                    .await
                {
                    return connection;
                }
            }
        };
        tokio::select! {
            connection = again, if no_way.is_connection_refused => Ok(connection),
            connection = self.dial_quic(address, deadline) => {
                let connection = connection?;
                if no_way.is_connection_refused
                    && let Ok(better) = self.tcp.connect(address, target, TCP_RETRY_PAUSE).await
                {
                    return Ok(better);
                }
                tracing::debug!(address, error = %no_way.error, "reached by QUIC");
                self.lock_tcp_unreachable().insert(target, Deadline::after_ms(TCP_AVOIDED_MS));
                Ok(connection)
            }
        }
    }

    fn is_tcp_unreachable(&self, target: SocketAddr) -> bool {
        let mut avoided = self.lock_tcp_unreachable();
        avoided.retain(|_, until| until.remaining_ms() > 0);
        avoided.contains_key(&target)
    }

    fn lock_tcp_unreachable(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Deadline>> {
        self.tcp_unreachable
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dial for Dialer {
    fn dial<'a>(
        &'a self,
        address: &'a str,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<Connection>> {
        match self.channel {
            Channel::Auto => Box::pin(self.dial_auto(address, deadline)),
            Channel::Quic => Box::pin(self.dial_quic(address, deadline)),
            Channel::Tcp => self.tcp.dial(address, deadline),
        }
    }
}

/// Accepts QUIC and TCP connections at one port number, and gives each request to a [`Service`].
#[derive(Debug)]
pub struct Listener {
    quic: QuicListener,
    tcp: Option<TlsTcpListener>,
}

impl Listener {
    /// Listens at `address` (`host:port`, port 0 for any) on the [`current_channel`] channel. Must
    /// be called within a tokio runtime.
    ///
    /// # Errors
    /// `Conflict` when the port is in use, `NotFound` when this machine has no such address,
    /// `RightMissing` when the user may not use it, `ServerFault` for anything else.
    pub fn bind(address: &str, identity: &Identity) -> Result<Self> {
        let mut tries = 0;
        loop {
            let quic = QuicListener::bind(address, identity.clone())?;
            if current_channel() == Channel::Quic {
                return Ok(Self { quic, tcp: None });
            }
            tries += 1;
            match TlsTcpListener::bind(quic.local_address()?, identity) {
                Ok(tcp) => {
                    let tcp = Some(tcp);
                    return Ok(Self { quic, tcp });
                }
                Err(error)
                    if error.code == ErrorCode::Conflict
                        && address.ends_with(":0")
                        && tries < PORT_ATTEMPTS_MAX => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// `ServerFault` when the system does not say.
    pub fn local_address(&self) -> Result<SocketAddr> {
        self.quic.local_address()
    }

    /// Serves until [`Listener::close`] or the runtime's end.
    pub async fn serve(&self, service: Arc<dyn Service>) {
        let quic = self.quic.serve(service.clone());
        match &self.tcp {
            Some(tcp) => {
                tokio::join!(quic, tcp.serve(service));
            }
            None => quic.await,
        }
    }

    /// Ends all connections politely, so that clients need not wait for silence.
    pub async fn close(&self) {
        if let Some(tcp) = &self.tcp {
            tcp.close();
        }
        self.quic.close().await;
    }
}
