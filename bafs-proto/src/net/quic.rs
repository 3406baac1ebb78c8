//! Exchanges over QUIC, one stream each, and the only user of quinn.
//!
//! A frame is `head length, body length` (32 bits each, little endian), head, body. The first
//! stream of a connection carries a [`Hello`] each way.

mod listener;

use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::crypto::{CryptoError, HmacKey};
use quinn::{
    ConnectionError, ConnectionId, ConnectionIdGenerator, Endpoint, EndpointConfig, RecvStream,
    SendStream, TransportConfig, VarInt,
};

use super::hello::{
    FRAME_TIMEOUT_MS, HelloReply, IDLE_TIMEOUT_MS, KEEP_ALIVE_INTERVAL_MS, check_hello,
    connection_error, decode_lengths, encode_lengths, own_hello, peer_closed_error, resolve,
};
use super::{BoxFuture, Connection, Dial, Exchange, Frame, listen_error_code, tls};
use crate::codec;
use crate::error::{Error, ErrorCode, Result};
use crate::hash::DigestKey;
use crate::identity::{Identity, SERVER_NAME};
use crate::ids::ServerId;
use crate::limits::STREAMS_MAX;
use crate::message::Hello;
use crate::time::Deadline;

pub use listener::QuicListener;

/// QUIC error codes that carry alerts of TLS (RFC 9001, section 4.8).
const TLS_ALERTS: std::ops::Range<u64> = 0x100..0x200;

/// Bytes of a connection's name, all by chance: names that can be checked, as the library makes
/// them, belong to one life of an endpoint, and the next life ignores them without a word.
const CONNECTION_ID_BYTES: usize = 8;

/// Purpose of the key by which a restarted server resets its old connections.
const RESET_KEY_PURPOSE: &str = "bafs 2026 stateless reset of a connection";

/// Shortest pause between two such resets: a thousand agents are reset within a second or two.
const RESET_INTERVAL_MIN: Duration = Duration::from_millis(1);

/// Flow-control window of a stream and of a connection, in bytes: 1.25 MB, the library's default,
/// is made for 100 Mbit/s at 100 ms and halves the rate of a faster link.
const WINDOW_BYTES: u32 = 8 << 20;

/// Socket buffers in bytes: with the system's default the kernel drops packets of a burst.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// Connects to servers.
pub struct QuicDialer {
    endpoint: Endpoint,
    identity: Identity,
}

impl std::fmt::Debug for QuicDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("QuicDialer")
    }
}

impl QuicDialer {
    /// A dialer that shows `identity`. Must be made within a tokio runtime.
    ///
    /// # Errors
    /// `ServerFault` when no socket can be had, `Malformed` when the identity is not usable.
    pub fn new(identity: Identity) -> Result<Self> {
        let endpoint = client_endpoint(&identity)?;
        Ok(Self { endpoint, identity })
    }

    async fn connect(&self, address: &str) -> Result<Connection> {
        let unreachable =
            |why: String| Error::new(ErrorCode::Unreachable, format!("{address}: {why}"));
        let target = resolve(address).await?;
        let connection = self
            .endpoint
            .connect(target, SERVER_NAME)
            .map_err(|e| unreachable(e.to_string()))?
            .await
            .map_err(|e| connect_error(address, &e))?;
        // The server verifies our certificate only after the client's handshake is complete.
        let server = self.say_hello(&connection).await.map_err(|error| {
            let reason = connection.close_reason();
            reason.map_or(error, |reason| connect_error(address, &reason))
        })?;
        Ok(Connection::new(Arc::new(QuicLink {
            connection,
            address: address.to_owned(),
            server,
        })))
    }

    async fn say_hello(&self, connection: &quinn::Connection) -> Result<Option<ServerId>> {
        let (mut send, mut receive) = connection
            .open_bi()
            .await
            .map_err(|e| connection_error(&e))?;
        let hello = codec::encode(&self.hello())?;
        write_frame(&mut send, (hello.into(), Bytes::new())).await?;
        let (head, _) = read_frame(&mut receive).await?;
        let theirs = codec::decode::<Result<HelloReply>>(&head)??;
        check_hello(&self.hello(), &theirs.hello)?;
        Ok(theirs.server)
    }

    fn hello(&self) -> Hello {
        own_hello(&self.identity)
    }
}

impl Dial for QuicDialer {
    fn dial<'a>(
        &'a self,
        address: &'a str,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<Connection>> {
        Box::pin(async move {
            tokio::time::timeout_at(deadline.instant().into(), self.connect(address))
                .await
                .unwrap_or_else(|_| {
                    let text = format!("{address} does not answer");
                    Err(Error::new(ErrorCode::Unreachable, text))
                })
        })
    }
}

struct QuicLink {
    connection: quinn::Connection,
    address: String,
    server: Option<ServerId>,
}

impl QuicLink {
    async fn exchange_frames(&self, frame: Frame) -> Result<Frame> {
        let (mut send, mut receive) = self
            .connection
            .open_bi()
            .await
            .map_err(|e| connection_error(&e))?;
        let written = write_frame(&mut send, frame).await;
        // A rejected peer gets the error before its request is completely written.
        let heard = read_frame(&mut receive).await;
        heard.or_else(|error| written.and(Err(error)))
    }
}

impl Exchange for QuicLink {
    fn exchange(&self, frame: Frame, deadline: Deadline) -> BoxFuture<'_, Result<Frame>> {
        Box::pin(async move {
            tokio::time::timeout_at(deadline.instant().into(), self.exchange_frames(frame))
                .await
                .unwrap_or_else(|_| {
                    let text = format!("{} did not answer in time", self.address);
                    Err(Error::new(ErrorCode::DeadlineExceeded, text))
                })
                .map_err(|e| e.context(&self.address))
        })
    }

    fn transport_name(&self) -> &'static str {
        "QUIC"
    }

    fn server(&self) -> Option<ServerId> {
        self.server
    }

    fn is_closed(&self) -> bool {
        self.connection.close_reason().is_some()
    }
}

/// The bare endpoint below [`QuicDialer`], for measurements of the library alone.
///
/// # Errors
/// As [`QuicDialer::new`].
pub fn client_endpoint(identity: &Identity) -> Result<Endpoint> {
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let mut endpoint = endpoint(any, None, identity)?;
    let tls = tls::client_config(identity)?;
    let crypto = QuicClientConfig::try_from(tls)
        .map_err(|e| Error::new(ErrorCode::Malformed, format!("TLS: {e}")))?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    config.transport_config(Arc::new(transport_config()));
    endpoint.set_default_client_config(config);
    Ok(endpoint)
}

/// The bare endpoint below [`QuicListener`].
///
/// # Errors
/// As [`QuicListener::bind`].
pub fn server_endpoint(address: &str, identity: &Identity) -> Result<Endpoint> {
    let target = address
        .to_socket_addrs()
        .ok()
        .and_then(|mut all| all.next())
        .ok_or_else(|| {
            Error::new(
                ErrorCode::Malformed,
                format!("'{address}' is not an address"),
            )
        })?;
    let crypto = QuicServerConfig::try_from(tls::server_config(identity)?)
        .map_err(|e| Error::new(ErrorCode::Malformed, format!("TLS: {e}")))?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(Arc::new(transport_config()));
    endpoint(target, Some(config), identity)
}

fn endpoint(
    address: SocketAddr,
    server: Option<quinn::ServerConfig>,
    identity: &Identity,
) -> Result<Endpoint> {
    let failed = |e: std::io::Error| {
        let code = listen_error_code(e.kind());
        Error::new(code, format!("cannot listen at {address}: {e}"))
    };
    let socket = UdpSocket::bind(address).map_err(failed)?;
    let buffers = socket2::SockRef::from(&socket);
    // Best effort: the system may allow less, and less works too.
    let _ = buffers.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    let _ = buffers.set_send_buffer_size(SOCKET_BUFFER_BYTES);
    let runtime = quinn::default_runtime().ok_or_else(|| {
        Error::new(
            ErrorCode::ServerFault,
            "a network endpoint needs a running tokio runtime",
        )
    })?;
    let bound = socket.local_addr().map_err(failed)?;
    Endpoint::new(
        persistent_endpoint_config(identity, bound),
        server,
        socket,
        runtime,
    )
    .map_err(failed)
}

/// A secret that all incarnations of an endpoint share. With it a new incarnation resets
/// connections of the last one authentically, so the peer need not wait for a timeout. The key
/// depends on the address, as a server of the same identity elsewhere could be made to say so too.
fn persistent_endpoint_config(identity: &Identity, bound: SocketAddr) -> EndpointConfig {
    let place = bound.to_string();
    let key = DigestKey::derive(RESET_KEY_PURPOSE, &identity.key_der, place.as_bytes());
    let mut config = EndpointConfig::new(Arc::new(ResetKey(key)));
    config
        .cid_generator(|| Box::new(RandomConnectionIds))
        .min_reset_interval(RESET_INTERVAL_MIN);
    config
}

struct ResetKey(DigestKey);

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        signature_out.copy_from_slice(&self.0.digest(data).0);
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> std::result::Result<(), CryptoError> {
        if self.0.is_digest_of(signature, data) {
            Ok(())
        } else {
            Err(CryptoError)
        }
    }
}

/// Names of connections; see [`CONNECTION_ID_BYTES`].
struct RandomConnectionIds;

impl ConnectionIdGenerator for RandomConnectionIds {
    fn generate_cid(&mut self) -> ConnectionId {
        ConnectionId::new(&rand::random::<[u8; CONNECTION_ID_BYTES]>())
    }

    fn cid_len(&self) -> usize {
        CONNECTION_ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

fn transport_config() -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .max_idle_timeout(Some(VarInt::from_u32(IDLE_TIMEOUT_MS).into()))
        .keep_alive_interval(Some(Duration::from_millis(KEEP_ALIVE_INTERVAL_MS)))
        .stream_receive_window(VarInt::from_u32(WINDOW_BYTES))
        .receive_window(VarInt::from_u32(4 * WINDOW_BYTES))
        .send_window(4 * u64::from(WINDOW_BYTES))
        .max_concurrent_bidi_streams(VarInt::from_u32(STREAMS_MAX))
        .max_concurrent_uni_streams(VarInt::from_u32(0));
    config
}

async fn write_frame(send: &mut SendStream, (head, body): Frame) -> Result<()> {
    let lengths = encode_lengths(&head, &body)?;
    let mut pieces = [Bytes::copy_from_slice(&lengths), head, body];
    send.write_all_chunks(&mut pieces)
        .await
        .map_err(|e| connection_error(&e))?;
    send.finish().map_err(|e| connection_error(&e))
}

async fn read_frame(receive: &mut RecvStream) -> Result<Frame> {
    let lengths = read_lengths(receive).await?;
    read_head_and_body(receive, lengths, FRAME_TIMEOUT_MS).await
}

async fn read_lengths(receive: &mut RecvStream) -> Result<(usize, usize)> {
    let mut lengths = [0; 8];
    receive
        .read_exact(&mut lengths)
        .await
        .map_err(|e| connection_error(&e))?;
    decode_lengths(lengths)
}

/// The head and the body, whose chunks arrive at most so many milliseconds apart.
async fn read_head_and_body(
    receive: &mut RecvStream,
    (head, body): (usize, usize),
    stall_ms: u64,
) -> Result<Frame> {
    let head = read_bytes(receive, head, stall_ms).await?;
    let body = read_bytes(receive, body, stall_ms).await?;
    Ok((head, body))
}

async fn read_bytes(receive: &mut RecvStream, length: usize, stall_ms: u64) -> Result<Bytes> {
    let mut bytes = BytesMut::with_capacity(length);
    while bytes.len() < length {
        let chunk = receive.read_chunk(length - bytes.len(), true);
        let chunk = tokio::time::timeout(Duration::from_millis(stall_ms), chunk)
            .await
            .map_err(|_| {
                let text = format!("a frame stood still for {stall_ms} ms");
                Error::new(ErrorCode::DeadlineExceeded, text)
            })?
            .map_err(|e| connection_error(&e))?
            .ok_or_else(peer_closed_error)?;
        if chunk.bytes.len() == length {
            return Ok(chunk.bytes);
        }
        bytes.extend_from_slice(&chunk.bytes);
    }
    Ok(bytes.freeze())
}

/// Why there is no connection. A certificate that is not accepted never will be, by either side.
fn connect_error(address: &str, error: &ConnectionError) -> Error {
    let code = match error {
        ConnectionError::TransportError(error) => Some(error.code),
        ConnectionError::ConnectionClosed(close) => Some(close.error_code),
        _ => None,
    };
    let refused = code.is_some_and(|code| TLS_ALERTS.contains(&u64::from(code)));
    if !refused {
        return connection_error(error).context(address);
    }
    let text =
        format!("{address}: {error}; check that both identities are of one cluster (`bafs init`)");
    Error::new(ErrorCode::PeerRefused, text)
}
