//! Finds the known name that the user probably meant. It knows nothing of jobs or keys.

/// The candidate with the fewest slips of the pen (insert, delete, replace, swap) from `word`;
/// none when even that one is too different. Case does not count.
#[must_use]
pub fn find_nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let word = word.to_lowercase();
    let letters = word.chars().count();
    // None in a letter, one in a short name, up to three in a long one: more would be guessing.
    let mut slips_max = if letters < 2 {
        0
    } else {
        (letters / 3).clamp(1, 3)
    };
    let mut best: Option<&str> = None;
    for candidate in candidates {
        let lower = candidate.to_lowercase();
        if lower.chars().count().abs_diff(letters) > slips_max {
            continue;
        }
        let slips = strsim::osa_distance(&word, &lower);
        // Of equals the first by alphabet, so that the order of candidates does not matter.
        if slips < slips_max || (slips == slips_max && best.is_none_or(|b| candidate < b)) {
            slips_max = slips;
            best = Some(candidate);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_name_corrects_slips_but_not_strangers() {
        let names = ["job", "volume", "extract", "mount"];
        assert_eq!(find_nearest("jbo", names), Some("job"));
        assert_eq!(find_nearest("volumes", names), Some("volume"));
        assert_eq!(find_nearest("MOUNT", names), Some("mount"));
        assert_eq!(find_nearest("extrakt", names), Some("extract"));
        assert_eq!(find_nearest("scratch", names), None);
        assert_eq!(find_nearest("", [""]), Some(""));
        assert_eq!(find_nearest("x", ["y"]), None);
    }

    #[test]
    fn alphabetical_order_breaks_ties_between_names() {
        assert_eq!(find_nearest("p9", ["p2", "p1", "p3"]), Some("p1"));
    }
}
