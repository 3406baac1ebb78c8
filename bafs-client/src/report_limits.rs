//! Keeps the report on a job short enough to be read. Counts nothing itself.

use bafs_proto::job_report::VolumeUse;

use crate::limits::{REPORT_PAGES_BYTES_MAX, REPORT_RUNS_MAX};
use crate::logic::page_set::join_runs;

/// Keeps the report within the size of a message: the most scattered files lose detail, and what is
/// still too much has none. A report that cannot be read would be worse than one that tells less.
pub(crate) fn limit_pages(volumes: &mut [VolumeUse]) {
    let pages = || volumes.iter().flat_map(|volume| &volume.pages);
    let files = pages().count();
    let runs: usize = pages().map(|pages| pages.page_runs.len()).sum();
    if runs > REPORT_RUNS_MAX {
        let share = (REPORT_RUNS_MAX / files.max(1)).max(1);
        for pages in volumes.iter_mut().flat_map(|volume| &mut volume.pages) {
            pages.page_runs = join_runs(std::mem::take(&mut pages.page_runs), share);
        }
    }
    let mut left = REPORT_PAGES_BYTES_MAX;
    for volume in volumes {
        let text = serde_json::to_string(&volume.pages);
        match left.checked_sub(text.map_or(usize::MAX, |text| text.len())) {
            Some(rest) => left = rest,
            None => {
                tracing::warn!(
                    volume = volume.name,
                    "too many pages were read to tell which"
                );
                volume.pages.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::job_report::TouchedPages;

    use super::*;

    #[test]
    fn a_report_of_many_files_stays_bounded() {
        let pages = |path: &str, files| {
            let path = path.to_owned();
            let (size, runs) = (1, vec![(0, 1), (5, 1)]);
            vec![
                TouchedPages {
                    path,
                    size,
                    page_runs: runs
                };
                files
            ]
        };
        let used = |pages| VolumeUse {
            pages,
            ..crate::usage::VolumeUsage::new().report("v", None, |_| None)
        };
        let long = "\n".repeat(2_000);
        let mut volumes = vec![used(pages("a", 15_000)), used(pages(&long, 3_000))];
        limit_pages(&mut volumes);
        assert_eq!(
            volumes[0].pages[0].page_runs,
            [(0, 6)],
            "detail is lost first"
        );
        assert_eq!(volumes[0].pages.len(), 15_000);
        assert_eq!(volumes[1].pages, []);
    }
}
