//! Connections within one process, for tests: real codec, real services, chosen faults.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Awaited, BoxFuture, Connection, Dial, Exchange, Frame, Peer, Service, answer};
use crate::error::{Error, ErrorCode, Result};
use crate::ids::ServerId;
use crate::message::Role;
use crate::time::Deadline;

/// A network of services within this process.
#[derive(Clone, Default)]
pub struct Network(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    services: BTreeMap<String, Arc<dyn Service>>,
    cut: BTreeSet<(String, String)>,
    delay: Duration,
    calls: u64,
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Network({} services)", self.lock().services.len())
    }
}

impl Network {
    /// A network without services.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a service at an address, in place of what was there.
    pub fn listen(&self, address: &str, service: Arc<dyn Service>) {
        self.lock().services.insert(address.to_owned(), service);
    }

    /// Takes the service at an address away, as a killed process would be.
    pub fn kill(&self, address: &str) {
        self.lock().services.remove(address);
    }

    /// Cuts the link from `source` to `target` (one direction); calls over it never answer.
    pub fn cut(&self, source: &str, target: &str) {
        self.lock()
            .cut
            .insert((source.to_owned(), target.to_owned()));
    }

    /// Heals all links.
    pub fn heal(&self) {
        self.lock().cut.clear();
    }

    /// Delays every call by `delay`.
    pub fn delay(&self, delay: Duration) {
        self.lock().delay = delay;
    }

    /// Calls made so far.
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// A dialer at the address `source`.
    pub fn dialer(&self, source: &str) -> Arc<dyn Dial> {
        Arc::new(MemDialer {
            network: self.clone(),
            source: source.to_owned(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct MemDialer {
    network: Network,
    source: String,
}

impl Dial for MemDialer {
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
            Ok(Connection::new(Arc::new(MemLink {
                network: self.network.clone(),
                source: self.source.clone(),
                target: address.to_owned(),
            })))
        })
    }
}

struct MemLink {
    network: Network,
    source: String,
    target: String,
}

impl Exchange for MemLink {
    fn exchange(&self, frame: Frame, deadline: Deadline) -> BoxFuture<'_, Result<Frame>> {
        Box::pin(async move {
            let (service, cut, delay) = {
                let mut state = self.network.lock();
                state.calls += 1;
                let link = (self.source.clone(), self.target.clone());
                (
                    state.services.get(&self.target).cloned(),
                    state.cut.contains(&link),
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
            let (_waiting, awaited) = Awaited::new();
            let answered = answer(service, peer, frame, awaited);
            tokio::time::timeout_at(deadline.instant().into(), answered)
                .await
                .map_err(|_| late())
        })
    }

    fn carrier(&self) -> &'static str {
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
