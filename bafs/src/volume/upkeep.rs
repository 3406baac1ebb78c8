//! `bafs volume renew` and `bafs volume resize`: how long a volume lives, and how much it may hold.

use anyhow::Result;
use bafs_proto::message::{GetVolume, RenewVolumes};
use bafs_proto::volume::{ResizeVolume, VolumeStatus};
use bafs_proto::{Error, ErrorCode};

use super::connection::connect;
use super::creation::{HOUR_MS, parse_size};
use super::description::{format_status, print_status, status_json};
use crate::args::{VolumeRenewArgs, VolumeResizeArgs};
use crate::output::Printer;

/// Puts off the end of volumes, one after the other; the first failure ends that.
pub(super) async fn renew_volumes(args: VolumeRenewArgs, output: Printer) -> Result<()> {
    let client = connect(&args.client)?;
    let listing = client.list_volumes_for_search().await?;
    let lifetime_ms = args.lifetime_hours.unwrap_or(0).saturating_mul(HOUR_MS);
    let (mut texts, mut all) = (Vec::new(), Vec::new());
    for wanted in &args.volumes {
        let (node, status) = client.find_volume_in(&listing, wanted).await?;
        let volume = status.spec.id;
        let call = RenewVolumes {
            volumes: vec![volume],
            lifetime_ms,
            gives_way: false,
        };
        let renewed = client.call(&node.address, call).await?;
        if !renewed.lost_volumes.is_empty() {
            let text = format!("volume {volume} was deleted or has expired");
            return Err(Error::new(ErrorCode::VolumeLost, text).into());
        }
        let status: VolumeStatus = client.call(&node.address, GetVolume { volume }).await?;
        texts.push(format_status(&node, &status));
        all.push(status_json(&node, &status));
    }
    match all.as_slice() {
        [one] => output.print_result(&texts.join("\n"), one),
        several => output.print_result(&texts.join("\n"), &several),
    }
}

/// Gives a volume another size.
pub(super) async fn resize_volume(args: VolumeResizeArgs, output: Printer) -> Result<()> {
    let size_bytes = parse_size(&args.size)?;
    let client = connect(&args.client)?;
    let (node, status) = client.find_volume(&args.volume).await?;
    let call = ResizeVolume {
        volume: status.spec.id,
        size_bytes,
        size_files: args.files,
    };
    let status = client.call(&node.address, call).await?;
    print_status(&node, &status, output)
}
