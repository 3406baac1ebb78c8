//! Small files of a cache volume that this node has, and names that are not there, in a job: beside
//! the directory at home that they come from, which is on this machine too.

use std::cell::RefCell;

use anyhow::Result;

use super::local::at_once;
use super::row;
use super::work::{Work, rate};
use crate::api::CacheWish;
use crate::bench::measure::{Samples, Way, interleave};
use crate::bench::shell::Shell;
use crate::bench::{Options, Report};
use crate::stage::Stage;

/// What a job does again and again with what it reads from: libraries, scripts, tables.
const WORKS: [(Work, &str); 4] = [
    (Work::OpenRead, "cache_open_read"),
    (Work::Absent, "cache_absent"),
    (Work::StatAgain, "cache_stat_again"),
    (Work::List, "cache_list"),
];

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let files = options.pick(5_000, 500);
    let stage = Stage::start(1, "20GB", None)?;
    let native = stage.world.home.path().join("small-files");
    let own = native.join("process-1");
    std::fs::create_dir_all(&own)?;
    rate(Work::Create, &own, files)?;
    let wish = CacheWish::of("small-files", 200_000_000);
    let volumes = stage.caches(&stage.nodes(), &wish)?;
    let mount = format!("{}:/data:ro", volumes[0].id);
    let shell = RefCell::new(Shell::job(&stage.world, &mount)?);
    report.section(&format!(
        "{files} files of 4 KiB of a cache on this node, in a job, beside the directory that they \
         come from: files/s"
    ));
    let native = native.to_string_lossy().into_owned();
    let mut rows = vec![row(["work", "cache", "directory", "cache / directory"])];
    for (work, figure) in WORKS {
        let way = |name, place: &str| {
            let (place, shell) = (place.to_owned(), &shell);
            Way::new(name, move || {
                at_once(&mut shell.borrow_mut(), work, &place, files, 1)
            })
        };
        let mut ways = [way("cache", "/data"), way("directory", &native)];
        // The first time files come from home, and names are learned.
        for way in &mut ways {
            (way.run)()?;
        }
        let found: Vec<Samples> = interleave(options.pick(7, 2), &mut ways)?;
        let ratio = found[0].ratio_to(&found[1]);
        report.measured(figure, &ratio);
        let (cache, directory) = (found[0].to_string(), found[1].to_string());
        rows.push(row([work.name(), &cache, &directory, &ratio.to_string()]));
    }
    report.table(&rows);
    Ok(())
}
