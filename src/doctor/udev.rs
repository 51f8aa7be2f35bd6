//! Checks whether the host's udev ignores what tenants write to their volumes.

use std::path::Path;

use super::Check;
use crate::host::Host;

/// Exists while udevd runs.
const CONTROL: &str = "/run/udev/control";
const FOLDERS: [&str; 4] = [
    "/etc/udev/rules.d",
    "/run/udev/rules.d",
    "/usr/local/lib/udev/rules.d",
    "/usr/lib/udev/rules.d",
];
const RULE: &str = "59-slackwater.rules";

/// Returns nothing if udev is not running, or is not visible, as in a container.
pub(super) fn examine(host: &dyn Host) -> Option<Check> {
    let is_there = |path: &Path| matches!(host.stat(path), Ok(Some(_)));
    if !is_there(Path::new(CONTROL)) {
        return None;
    }
    let found = FOLDERS
        .iter()
        .map(|folder| Path::new(folder).join(RULE))
        .find(|rule| is_there(rule));
    Some(match found {
        Some(rule) => Check::ok(
            "udev",
            format!("ignores volumes, because of {}", rule.display()),
        ),
        None => Check::warn(
            "udev",
            "it probes data that tenants write to their volumes: labels get links in /dev/disk, and LVM, md and btrfs may activate devices found on volumes",
            format!(
                "copy deploy/chart/files/{RULE} to /etc/udev/rules.d (in the chart: udevRule.install)"
            ),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::memory::MemoryHost;

    #[test]
    fn a_missing_rule_is_reported_where_udev_runs_and_nowhere_else() {
        let host = MemoryHost::new();
        let make = |path: &str| host.make_folder(Path::new(path)).unwrap();
        assert!(examine(&host).is_none());
        make(CONTROL);
        let without = format!("{:?}", examine(&host).unwrap());
        assert!(without.contains("/etc/udev/rules.d"), "{without}");
        make(&format!("/run/udev/rules.d/{RULE}"));
        let with = format!("{:?}", examine(&host).unwrap());
        assert!(with.contains("ignores volumes"), "{with}");
    }
}
