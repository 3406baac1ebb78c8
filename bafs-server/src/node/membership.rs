//! A node among others: tells the catalog what it is, at once when that changes, and learns its
//! peers, and where homes are. A catalog that is away is no harm, unless the node ends with it.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::attributes::Constraint;
use bafs_proto::message::{Advertise, QueryServers, ServerKind};
use bafs_proto::time::Deadline;

use super::Node;
use crate::serving::{ADVERTISE_MS, AdvertLog, withdraw};

/// Shortest time between two adverts, in milliseconds: many changes at once are told together.
const ADVERTISE_MS_MIN: u64 = 50;

/// A node that ends with its catalog calls it so often in vain before: after a stop or a suspension
/// of this machine, the time alone says nothing.
const MISSES_MIN: u32 = 10;

/// Tells the catalog, again and again, for ever.
pub(super) async fn advertise_node(node: Arc<Node>, catalog: String) {
    let mut volumes = node.storage.changes();
    let mut jobs = node.executor.changes();
    let mut departure = node.departure.changes();
    let mut heard = AdvertLog::default();
    let catalog_timeout = node.config.catalog_timeout;
    let mut abandoned_at = catalog_timeout.map(Deadline::after);
    let mut misses = 0;
    loop {
        volumes.mark_unchanged();
        jobs.mark_unchanged();
        departure.mark_unchanged();
        let call = Advertise {
            advert: node.advert(),
        };
        let deadline = Deadline::after_ms(ADVERTISE_MS);
        let token = &node.config.identity.token;
        let answer = node.pool.call(&catalog, token, call, deadline).await;
        misses = if answer.is_ok() { 0 } else { misses + 1 };
        if misses == 0 {
            abandoned_at = catalog_timeout.map(Deadline::after);
        } else if misses >= MISSES_MIN && abandoned_at.is_some_and(|at| at.remaining().is_zero()) {
            abandoned_at = None;
            tracing::warn!(%catalog, "the catalog of this node is gone: the node ends");
            node.departure.begin_end();
        }
        heard.note(&catalog, answer.map(drop));
        tokio::time::sleep(Duration::from_millis(ADVERTISE_MS_MIN)).await;
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(ADVERTISE_MS - ADVERTISE_MS_MIN)) => {}
            _ = volumes.changed() => {}
            _ = jobs.changed() => {}
            _ = departure.changed() => {}
        }
    }
}

/// Tells the catalog that the node is gone, so that nobody waits for it.
pub(super) async fn withdraw_node(node: &Node) {
    let Some(catalog) = &node.config.catalog else {
        return;
    };
    let token = &node.config.identity.token;
    withdraw(&node.pool, token, catalog, node.advert()).await;
}

/// Tells the caches, again and again, which nodes of the group live, and where homes are.
pub(super) async fn follow_catalog(node: Arc<Node>) {
    loop {
        tokio::join!(update_peers(&node), update_homes(&node));
        tokio::time::sleep(Duration::from_millis(ADVERTISE_MS)).await;
    }
}

/// Tells the caches which nodes of the group live now. Whoever creates a cache volume knows its
/// nodes from the catalog, so a look at it before the creation sees at least these: a new cache
/// must not be read before its peers know each other, or several would go home for one block.
pub(super) async fn update_peers(node: &Node) {
    let Some(catalog) = &node.config.catalog else {
        return;
    };
    let query = QueryServers {
        kind: Some(ServerKind::Node),
        constraint: Constraint::default().and_equal("group", &node.config.group),
    };
    let deadline = Deadline::after_ms(ADVERTISE_MS);
    let token = &node.config.identity.token;
    match node.pool.call(catalog, token, query, deadline).await {
        Ok(list) => node.caches.set_peers(list.servers),
        // The peers of a moment ago are the best guess; one that is gone shows by itself.
        Err(error) => tracing::debug!(%catalog, %error, "peers not learned"),
    }
}

/// Learns where home servers are: one that comes back at another address is still the same.
async fn update_homes(node: &Node) {
    let Some(catalog) = &node.config.catalog else {
        return;
    };
    let query = QueryServers {
        kind: Some(ServerKind::Home),
        ..QueryServers::default()
    };
    let deadline = Deadline::after_ms(ADVERTISE_MS);
    let token = &node.config.identity.token;
    match node.pool.call(catalog, token, query, deadline).await {
        Ok(list) => node.homes.update_locations(&list.servers),
        Err(error) => tracing::debug!(%catalog, %error, "homes not learned"),
    }
}
