//! Connections within one process, for tests: real codec, real services, chosen faults.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{
    BoxFuture, Cancellation, Connection, Dial, Exchange, Frame, Peer, Service, serve_frame,
};
use crate::error::{Error, ErrorCode, Result};
use crate::ids::ServerId;
use crate::message::Role;
use crate::time::Deadline;

/// A network of services within this process.
#[derive(Clone, Default)]
pub struct MemoryNetwork(Arc<Mutex<NetworkState>>);

#[derive(Default)]
struct NetworkState {
    services: BTreeMap<String, Arc<dyn Service>>,
    cut_links: BTreeSet<(String, String)>,
    delay: Duration,
    call_count: u64,
}

impl std::fmt::Debug for MemoryNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MemoryNetwork({} services)", self.lock().services.len())
    }
}

impl MemoryNetwork {
    /// A network without services.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a service at an address and replaces any earlier one.
    pub fn listen(&self, address: &str, service: Arc<dyn Service>) {
        self.lock().services.insert(address.to_owned(), service);
    }

    /// Takes the service at an address away, as a killed process would be.
    pub fn kill(&self, address: &str) {
        self.lock().services.remove(address);
    }

    /// Cuts the link from `source` to `target` (one direction); calls over it never answer.
    pub fn cut_link(&self, source: &str, target: &str) {
        self.lock()
            .cut_links
            .insert((source.to_owned(), target.to_owned()));
    }

    /// Heals all links.
    pub fn heal_links(&self) {
        self.lock().cut_links.clear();
    }

    /// Delays every call by `delay`.
    pub fn set_delay(&self, delay: Duration) {
        self.lock().delay = delay;
    }

    /// Calls made so far.
    pub fn call_count(&self) -> u64 {
        self.lock().call_count
    }

    /// A dialer at the address `source`.
    pub fn dialer(&self, source: &str) -> Arc<dyn Dial> {
        Arc::new(MemoryDialer {
            network: self.clone(),
            source: source.to_owned(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct MemoryDialer {
    network: MemoryNetwork,
    source: String,
}

impl Dial for MemoryDialer {
    fn dial<'a>(
        &'a self,
        address: &'a str,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<Connection>> {
        Box::pin(async move {
            if !self.network.lock().services.contains_key(address) {
                let text = format!("nothing listens at {address}");
                return Err(Error::new(ErrorCode::Unreachable, text));
            }
            Ok(Connection::new(Arc::new(MemoryLink {
                network: self.network.clone(),
                source: self.source.clone(),
                target: address.to_owned(),
            })))
        })
    }
}

struct MemoryLink {
    network: MemoryNetwork,
    source: String,
    target: String,
}

impl Exchange for MemoryLink {
    fn exchange(&self, frame: Frame, deadline: Deadline) -> BoxFuture<'_, Result<Frame>> {
        Box::pin(async move {
            let (service, cut, delay) = {
                let mut state = self.network.lock();
                state.call_count += 1;
                let link = (self.source.clone(), self.target.clone());
                (
                    state.services.get(&self.target).cloned(),
                    state.cut_links.contains(&link),
                    state.delay,
                )
            };
            let late = || {
                let text = format!("{} did not answer in time", self.target);
                Error::new(ErrorCode::DeadlineExceeded, text)
            };
            if cut {
                tokio::time::sleep_until(deadline.instant().into()).await;
                return Err(late());
            }
            let Some(service) = service else {
                let text = format!("nothing listens at {}", self.target);
                return Err(Error::new(ErrorCode::Unreachable, text));
            };
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            let peer = Peer {
                role: Role::Agent,
                address: self.source.clone(),
            };
            let (_waiting, awaited) = Cancellation::new();
            let answered = serve_frame(service, peer, frame, awaited);
            tokio::time::timeout_at(deadline.instant().into(), answered)
                .await
                .map_err(|_| late())
        })
    }

    fn transport_name(&self) -> &'static str {
        "memory"
    }

    fn server(&self) -> Option<ServerId> {
        let service = self.network.lock().services.get(&self.target).cloned();
        service.and_then(|service| service.server())
    }

    fn is_closed(&self) -> bool {
        !self.network.lock().services.contains_key(&self.target)
    }
}
