//! What all servers share: listening, telling the catalog, stopping.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::identity::Identity;
use bafs_proto::message::{Advert, Advertise};
use bafs_proto::net::channel::{Dialer, Listener};
use bafs_proto::net::pool::Pool;
use bafs_proto::net::{BoxFuture, Service};
use bafs_proto::path::{check_name, check_printable};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::counters::ReadMetrics;
use crate::departure::Departure;

/// How often a server tells the catalog that it is alive.
pub const ADVERTISE_MS: u64 = 1_000;

/// How long the catalog believes an advert: three may be lost.
pub const ADVERT_TTL_MS: u64 = 4 * ADVERTISE_MS;

/// Adverts in a row that fail before somebody is told: shorter is a catalog that is started anew.
const FAILURES_BEFORE_WARNING: u32 = 3;

/// What to do then.
const CATALOG_UNREACHABLE_ADVICE: &str = "the catalog does not accept its advert; check that `bafs \
    catalog` runs at that address with an identity of the same cluster; this server retries";

/// A running server: its listener and its background tasks.
pub struct RunningServer {
    address: SocketAddr,
    listener: Arc<Listener>,
    tasks: Vec<JoinHandle<()>>,
    read_metrics: ReadMetrics,
    fatal_condition: Option<FatalCondition>,
    departure: Option<ServerDeparture>,
    /// Tells the catalog that it is gone.
    withdrawal: Option<BoxFuture<'static, ()>>,
    /// Removes what its tasks leave.
    cleanup: Option<BoxFuture<'static, ()>>,
}

/// How a server leaves that others must not miss suddenly.
pub(crate) struct ServerDeparture {
    pub(crate) departure: Departure,
    /// Waits until the server has to end.
    pub(crate) ended: BoxFuture<'static, ()>,
    /// Tells others that it is gone.
    pub(crate) farewell: BoxFuture<'static, ()>,
}

/// When a server cannot go on, and why.
type FatalCondition = (watch::Receiver<bool>, Box<dyn Fn() -> Error + Send>);

impl fmt::Debug for RunningServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({})", self.address)
    }
}

impl RunningServer {
    /// Starts to serve at a listener that is already bound.
    ///
    /// # Errors
    /// `ServerFault` when the system does not tell the address.
    pub fn start(
        listener: Listener,
        service: Arc<dyn Service>,
        figures: ReadMetrics,
    ) -> Result<Self> {
        let address = listener.local_address()?;
        let listener = Arc::new(listener);
        let serving = listener.clone();
        let task = tokio::spawn(async move { serving.serve(service).await });
        Ok(Self {
            address,
            listener,
            tasks: vec![task],
            read_metrics: figures,
            fatal_condition: None,
            departure: None,
            withdrawal: None,
            cleanup: None,
        })
    }

    /// Says when the server cannot go on, and why.
    pub fn set_fatal_condition(
        &mut self,
        is_over: watch::Receiver<bool>,
        why: impl Fn() -> Error + Send + 'static,
    ) {
        self.fatal_condition = Some((is_over, Box::new(why)));
    }

    /// Waits until the server has to end, with the reason if it is a fault: for ever, where nothing
    /// can end it.
    pub async fn wait_for_end(&mut self) -> Option<Error> {
        let (fatal, departure) = (&mut self.fatal_condition, &mut self.departure);
        let fault = async {
            if let Some((is_over, why)) = fatal
                && is_over.wait_for(|is_over| *is_over).await.is_ok()
            {
                return why();
            }
            std::future::pending().await
        };
        let ended = async {
            match departure {
                Some(leaving) => leaving.ended.as_mut().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            fault = fault => Some(fault),
            () = ended => None,
        }
    }

    /// Says how the server leaves.
    pub(crate) fn set_departure(&mut self, departure: ServerDeparture) {
        self.departure = Some(departure);
    }

    /// Asks the server to end soon; answers whether it needs time for that. Otherwise it may be
    /// stopped at once.
    pub fn begin_end(&self) -> bool {
        let departure = self.departure.as_ref();
        departure.is_some_and(|leaving| {
            leaving.departure.begin_end();
            true
        })
    }

    /// Asks the server to end when it may be started again under its address without harm; answers
    /// whether it needs time for that.
    pub fn begin_restart(&self) -> bool {
        let departure = self.departure.as_ref();
        departure.is_some_and(|leaving| {
            leaving.departure.begin_restart();
            true
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Reads what it publishes.
    pub fn read_metrics(&self) -> ReadMetrics {
        self.read_metrics.clone()
    }

    /// Ties a background task to the server: it ends when the server stops.
    pub fn add_task(&mut self, task: JoinHandle<()>) {
        self.tasks.push(task);
    }

    /// Says how the catalog is told that the server is gone.
    pub(crate) fn set_withdrawal(&mut self, withdrawal: impl Future<Output = ()> + Send + 'static) {
        self.withdrawal = Some(Box::pin(withdrawal));
    }

    /// Says what removes the remains of its tasks, which have been aborted then.
    pub(crate) fn set_cleanup(&mut self, cleanup: impl Future<Output = ()> + Send + 'static) {
        self.cleanup = Some(Box::pin(cleanup));
    }

    /// Stops a server that does not come back: the catalog forgets it at once.
    pub async fn leave(mut self) {
        for task in &self.tasks {
            task.abort();
        }
        if let Some(withdrawal) = self.withdrawal.take() {
            withdrawal.await;
        }
        self.stop().await;
    }

    /// Stops serving and closes connections politely.
    pub async fn stop(self) {
        for task in &self.tasks {
            task.abort();
        }
        if let Some(leaving) = self.departure
            && leaving.departure.interrupts_jobs()
        {
            leaving.farewell.await;
        }
        self.listener.close().await;
        if let Some(cleanup) = self.cleanup {
            cleanup.await;
        }
    }
}

/// A pool of connections for a process with this identity.
///
/// # Errors
/// `ServerFault` or `Malformed` when the identity or the network is not usable.
pub fn pool(identity: &Identity) -> Result<Pool> {
    Ok(Pool::new(Arc::new(Dialer::new(identity)?)))
}

/// The address that others use for what listens at `local`: a server that listens everywhere is
/// reached under the machine's name.
pub(crate) fn reachable_address(local: SocketAddr) -> String {
    if !local.ip().is_unspecified() {
        return local.to_string();
    }
    let system = rustix::system::uname();
    format!("{}:{}", system.nodename().to_string_lossy(), local.port())
}

/// Checks the name and the group of a server: people see them in lists.
///
/// # Errors
/// `BadPath`.
pub(crate) fn check_names(name: &str, group: &str) -> Result<()> {
    check_name(name)?;
    check_printable(group).map_err(|error| error.context("group"))
}

/// What a server says in its log of the answers of the catalog to its adverts: a refusal, and once
/// why it cannot be told anything, when that lasts.
#[derive(Debug, Default)]
pub(crate) struct AdvertLog {
    refusal: Option<Error>,
    failures: u32,
}

impl AdvertLog {
    /// Takes what became of an advert.
    pub(crate) fn note(&mut self, catalog: &str, answer: Result<()>) {
        let Err(error) = answer else {
            if self.failures >= FAILURES_BEFORE_WARNING {
                tracing::info!(%catalog, "the catalog lists this server");
            }
            *self = Self::default();
            return;
        };
        if matches!(error.code, ErrorCode::Conflict | ErrorCode::Malformed) {
            if self.refusal.as_ref() != Some(&error) {
                tracing::warn!(%catalog, %error, "the catalog does not list this server");
            }
            self.refusal = Some(error);
            return;
        }
        self.failures = self.failures.saturating_add(1);
        if self.failures == FAILURES_BEFORE_WARNING {
            tracing::warn!(%catalog, %error, "this server cannot be found: \
                {CATALOG_UNREACHABLE_ADVICE}");
        }
        tracing::debug!(%catalog, %error, "catalog not told");
    }
}

/// Tells the catalog again and again what `describe` says, for ever. A catalog that is away is no
/// harm: it learns everything again when it returns.
pub async fn advertise(
    pool: Pool,
    token: Token,
    catalog: String,
    describe: impl Fn() -> Advert + Send,
) {
    let mut heard = AdvertLog::default();
    loop {
        let call = Advertise { advert: describe() };
        let deadline = Deadline::after_ms(ADVERTISE_MS);
        let answer = pool.call(&catalog, &token, call, deadline).await;
        heard.note(&catalog, answer.map(drop));
        tokio::time::sleep(Duration::from_millis(ADVERTISE_MS)).await;
    }
}

/// Tells the catalog that a server is gone, so that nobody waits for it.
pub(crate) async fn withdraw(pool: &Pool, token: &Token, catalog: &str, advert: Advert) {
    let call = Advertise {
        advert: Advert {
            ttl_ms: 0,
            ..advert
        },
    };
    let deadline = Deadline::after_ms(ADVERTISE_MS);
    if let Err(error) = pool.call(catalog, token, call, deadline).await {
        tracing::debug!(%catalog, %error, "the catalog forgets this server soon");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_not_advertised() {
        let told = reachable_address(SocketAddr::from(([0, 0, 0, 0], 7)));
        assert!(
            told.ends_with(":7") && !told.starts_with("0.0.0.0"),
            "{told}"
        );
        let local = SocketAddr::from(([127, 0, 0, 1], 7));
        assert_eq!(reachable_address(local), "127.0.0.1:7");
    }
}
