//! The catalog: which servers live. Soft state only; it may crash and return, and running jobs do
//! not notice. What it decides is in `logic/adverts.rs`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::identity::Identity;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{
    AdvertiseReply, Counters as CounterValues, QueryServers, Reply, Request, ServerList,
};
use bafs_proto::net::channel::Listener;
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::token::{Resource, Right, Verifier};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use crate::access::AccessChecker;
use crate::clock;
use crate::counters::{Counters, Metrics, ReadMetrics};
use crate::logic::adverts::{ADVERTS_MAX, AdvertRefusal, Adverts};
use crate::serving::RunningServer;
use crate::start_error::StartError;

/// What a catalog needs to start.
#[derive(Debug, Clone)]
pub struct CatalogConfig {
    /// Where to listen, `host:port`; port 0 takes a free one.
    pub listen: String,
    /// Proves that the catalog belongs to the cluster.
    pub identity: Identity,
}

/// Starts a catalog.
///
/// # Errors
/// `Conflict` when the port is in use, `Malformed` when the identity is not usable.
pub async fn start(config: CatalogConfig) -> Result<RunningServer, StartError> {
    let service = Arc::new(Catalog::new(config.identity.verifier.clone()));
    let listener = Listener::bind(&config.listen, &config.identity);
    let listener = listener.map_err(StartError::from_listening)?;
    let published = service.clone();
    let figures: ReadMetrics = Arc::new(move || published.metrics());
    Ok(RunningServer::start(listener, service, figures)?)
}

/// Answers calls about servers.
#[derive(Debug)]
pub struct Catalog {
    id: ServerId,
    access: AccessChecker,
    adverts: Mutex<Adverts>,
    counters: Counters,
}

impl Catalog {
    /// A catalog that knows nobody yet and believes tokens of this verifier's authority.
    pub fn new(verifier: Verifier) -> Self {
        Self {
            id: ServerId::random(),
            access: AccessChecker::new(verifier),
            adverts: Mutex::default(),
            counters: Counters::default(),
        }
    }

    fn metrics(&self) -> Metrics {
        let listed = self.adverts().query(clock::now(), &QueryServers::default());
        Metrics {
            counters: self.counters.snapshot(),
            gauges: BTreeMap::from([("servers", listed.len() as u64)]),
        }
    }

    fn adverts(&self) -> MutexGuard<'_, Adverts> {
        self.adverts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, incoming: IncomingRequest) -> Result<Reply> {
        let (token, now) = (&incoming.token, clock::now());
        self.counters
            .add(&format!("calls.{}", incoming.request.name()), 1);
        match incoming.request {
            Request::Advertise(call) => {
                self.access
                    .require(token, Resource::Catalog, Right::Write)?;
                let servers = self
                    .adverts()
                    .advertise(now, call.advert)
                    .map_err(refusal_error)?;
                let servers = u32::try_from(servers).unwrap_or(u32::MAX);
                Ok(Reply::Advertise(AdvertiseReply {
                    server_count: servers,
                }))
            }
            Request::QueryServers(call) => {
                self.access.require(token, Resource::Catalog, Right::Read)?;
                Ok(Reply::QueryServers(ServerList {
                    servers: self.adverts().query(now, &call),
                }))
            }
            Request::ReadCounters(_) => {
                self.access.require(token, Resource::Catalog, Right::Read)?;
                let values = self.counters.snapshot();
                Ok(Reply::ReadCounters(CounterValues {
                    server: self.id,
                    values,
                }))
            }
            other => {
                let text = format!(
                    "a catalog does not answer {}; ask a node or home",
                    other.name()
                );
                Err(Error::new(ErrorCode::Unsupported, text))
            }
        }
    }
}

impl Service for Catalog {
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move {
            let right = match incoming.request {
                Request::Advertise(_) => Right::Write,
                _ => Right::Read,
            };
            let need = (Arc::new(incoming.token.clone()), Resource::Catalog, right);
            if !self.access.has_verdicts([&need]) {
                self.access
                    .check_until_refused(&incoming.peer.address, vec![need])
                    .await;
            }
            Ok((self.answer(incoming)?, Bytes::new()))
        })
    }
}

fn refusal_error(refusal: AdvertRefusal) -> Error {
    match refusal {
        AdvertRefusal::Full => {
            let text = format!(
                "the catalog is full: it lists at most {ADVERTS_MAX} servers, and no more caches \
                 than fit into one reply"
            );
            Error::new(ErrorCode::Busy, text)
        }
        AdvertRefusal::Malformed => {
            let text = "a name, address, group or list of caches in the advert is too long or has \
                        control characters";
            Error::new(ErrorCode::Malformed, text)
        }
        AdvertRefusal::NameInUse { address } => {
            let text = format!(
                "the home at {address} already has this name, so the catalog rejects this home; \
                 give it another name (`--name`)"
            );
            Error::new(ErrorCode::Conflict, text)
        }
        AdvertRefusal::SameDirectory { name, address } => {
            let text = format!(
                "the home '{name}' at {address} exports the same directory, so the catalog rejects \
                 this home; stop one of them, or export another directory"
            );
            Error::new(ErrorCode::Conflict, text)
        }
    }
}
