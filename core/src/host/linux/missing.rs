//! Prerequisites that this host lacks, each with its fix.

use super::{loop_device, program};

/// The number of CAP_SYS_ADMIN in linux/capability.h.
pub const SYS_ADMIN: u32 = 21;
/// The number of CAP_SYS_RESOURCE.
pub const SYS_RESOURCE: u32 = 24;

/// Whether this process has a capability in its effective set.
pub fn has_capability(bit: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    effective_capabilities(&status).is_some_and(|mask| mask >> bit & 1 == 1)
}

/// The mask of effective capabilities, from the text of /proc/PID/status.
pub fn effective_capabilities(status: &str) -> Option<u64> {
    let mut lines = status.lines();
    let mask = lines.find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

/// Prerequisites without which no volume works. A tool that only one file system needs (its mkfs,
/// the tool that grows ext4) is not listed: its absence fails the calls that need it, and must not
/// keep the driver from being ready.
pub(super) fn list() -> Vec<String> {
    let mut missing = Vec::new();
    if !has_capability(SYS_ADMIN) {
        missing.push(
            "the capability CAP_SYS_ADMIN is missing, so nothing can be mounted; run as root, and the container as privileged"
                .to_string(),
        );
    }
    missing.extend(loop_device::missing());
    if program::BLKID.find().is_none() {
        missing.push(format!(
            "the program {} is missing; install the package {}",
            program::BLKID.name,
            program::BLKID.package
        ));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_mask() {
        let status = "Name:\tx\nCapPrm:\t0\nCapEff:\t000001fffeffffff\n";
        let mask = effective_capabilities(status).unwrap();
        assert!(mask >> SYS_ADMIN & 1 == 1);
        assert!(mask >> SYS_RESOURCE & 1 == 0);
        assert_eq!(effective_capabilities(""), None);
    }

    #[test]
    fn fuzz_the_status_of_a_process() {
        let status = "Name:\tx\nCapPrm:\t0\nCapEff:\t000001fffeffffff\n";
        crate::fuzz::fuzz_text("capabilities", &[status], effective_capabilities);
    }
}
