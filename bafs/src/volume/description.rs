//! What is told of volumes: a line for people, an object for programs. Asks no server.

use std::collections::BTreeMap;

use anyhow::Result;
use bafs_proto::message::Advert;
use bafs_proto::volume::{VolumeKind, VolumeSource, VolumeState, VolumeStatus};
use serde_json::{Value, json};

use crate::output::Printer;

/// Names of live servers by address, to say where a volume came from.
pub(super) type ServerNames = BTreeMap<String, String>;

/// The names of servers.
pub(super) fn server_names(servers: &[Advert]) -> ServerNames {
    let named = servers
        .iter()
        .map(|it| (it.address.clone(), it.name.clone()));
    named.collect()
}

/// What a volume waits for that is not made yet.
pub(super) fn describe_wait(kind: &VolumeKind) -> Option<String> {
    match kind {
        VolumeKind::Cache {
            source: VolumeSource::Home { address, path, .. },
            ..
        } => Some(format!(
            "waits up to ten minutes for home {address} to list '{path}'; if the home or path is \
             wrong, delete the volume"
        )),
        VolumeKind::Scratch {
            fill: Some(VolumeSource::Home { address, path, .. }),
        } => Some(format!(
            "fills it with '{path}' of home {address}; fails after two minutes without an answer \
             (`bafs servers` lists live homes)"
        )),
        _ => None,
    }
}

pub(super) fn print_status(node: &Advert, status: &VolumeStatus, output: Printer) -> Result<()> {
    output.print_result(&format_status(node, status), &status_json(node, status))
}

pub(super) fn format_status(node: &Advert, status: &VolumeStatus) -> String {
    let kept = match status.state {
        // Its time begins when it is made.
        VolumeState::Creating => String::new(),
        VolumeState::Ready | VolumeState::Failed => {
            let until = status.expires.to_utc_text();
            format!("; kept until {until}, longer while it is in use")
        }
    };
    let mut text = format!(
        "{} {} on {}: {} volume, {}, {} of {} bytes and {} of {} files used{kept}{}",
        status.spec.id,
        status.spec.name,
        node.name,
        kind_name(&status.spec.kind),
        state_name(status.state),
        status.used_bytes,
        status.spec.size_bytes,
        status.used_files,
        status.spec.size_files,
        match &status.error {
            Some(fault) => format!("; {fault}"),
            None => String::new(),
        }
    );
    for warning in status.warnings.sentences(&status.spec.name) {
        text.push_str(&format!("\n  warning: {warning}"));
    }
    text
}

pub(super) fn status_json(node: &Advert, status: &VolumeStatus) -> Value {
    json!({
        "id": status.spec.id.to_string(),
        "name": status.spec.name,
        "owner": status.spec.owner,
        "node": node.name,
        "address": node.address,
        "kind": kind_name(&status.spec.kind),
        "origin": origin_json(&status.spec.kind),
        "state": status.state,
        "error": status.error.as_ref().map(|fault| fault.to_string()),
        "used_bytes": status.used_bytes,
        "size_bytes": status.spec.size_bytes,
        "used_files": status.used_files,
        "size_files": status.spec.size_files,
        "manifest": status.manifest.map(|digest| digest.to_string()),
        "warnings": status.warnings.warnings,
        "warnings_omitted": status.warnings.omitted_count,
        "expires": status.expires,
        "lifetime_ms": status.spec.lifetime_ms,
    })
}

/// Where the data of a volume came from: a volume or a home, if it was not empty at first.
fn origin_json(kind: &VolumeKind) -> Value {
    match source_of(kind) {
        Some(VolumeSource::Volume { address, volume }) => json!({
            "kind": "volume",
            "volume": volume.to_string(),
            "address": address,
        }),
        Some(VolumeSource::Home { address, path, id }) => json!({
            "kind": "home",
            "home": id.map(|id| id.to_string()),
            "address": address,
            "path": path,
        }),
        None => Value::Null,
    }
}

/// What fills a volume.
pub(super) fn source_of(kind: &VolumeKind) -> Option<&VolumeSource> {
    match kind {
        VolumeKind::Scratch { fill } => fill.as_ref(),
        VolumeKind::Cache { source, .. } => Some(source),
    }
}

/// Further line of `bafs volume show`: where the data came from.
pub(super) fn format_origin(kind: &VolumeKind, names: &ServerNames) -> String {
    let name = |address: &String| names.get(address).unwrap_or(address).clone();
    match source_of(kind) {
        Some(VolumeSource::Volume { address, volume }) => {
            format!("\n  copy of volume {volume} on {}", name(address))
        }
        Some(VolumeSource::Home { address, path, .. }) => {
            format!("\n  from '{path}' of home {}", name(address))
        }
        None => String::new(),
    }
}

pub(super) fn state_name(state: VolumeState) -> &'static str {
    match state {
        VolumeState::Creating => "creating",
        VolumeState::Ready => "ready",
        VolumeState::Failed => "failed",
    }
}

pub(super) fn kind_name(kind: &VolumeKind) -> &'static str {
    match kind {
        VolumeKind::Scratch { .. } => "scratch",
        VolumeKind::Cache { .. } => "cache",
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{ServerId, VolumeId};
    use bafs_proto::message::{Lifetime, ServerKind};
    use bafs_proto::source_warning::SourceWarnings;
    use bafs_proto::time::Time;
    use bafs_proto::volume::{LimitKind, VolumeSpec};

    use super::*;
    use bafs_proto::attributes::Attributes;

    #[test]
    fn volume_description_names_its_expiry_time() {
        let node = Advert {
            id: ServerId::random(),
            kind: ServerKind::Node,
            name: "n1".to_owned(),
            address: String::new(),
            group: String::new(),
            ttl_ms: 1_000,
            capacity_bytes: 0,
            capacity_files: 0,
            free_bytes: 0,
            free_files: 0,
            slots: 0,
            jobs: 0,
            caches: Vec::new(),
            attributes: Attributes::default(),
            lifetime: Lifetime::default(),
        };
        let mut status = VolumeStatus {
            spec: VolumeSpec {
                id: VolumeId::random(),
                name: "work".to_owned(),
                owner: "me".to_owned(),
                kind: VolumeKind::Scratch { fill: None },
                size_bytes: 1,
                size_files: 1,
                limit: LimitKind::Exact,
                lifetime_ms: 3_600_000,
            },
            state: VolumeState::Ready,
            error: None,
            used_bytes: 0,
            used_files: 0,
            received_bytes: 0,
            manifest: None,
            warnings: SourceWarnings::default(),
            expires: Time(1_785_765_901_000),
        };
        let told = format_status(&node, &status);
        assert!(
            told.contains("kept until 2026-08-03 14:05:01 UTC"),
            "{told}"
        );
        status.state = VolumeState::Creating;
        let told = format_status(&node, &status);
        assert!(!told.contains("kept until"), "{told}");
    }
}
