//! Prerequisites that this host lacks, each with its fix.

use super::{loop_device, program};

/// Capability numbers from linux/capability.h.
pub(super) const SYS_ADMIN: u32 = 21;
pub(super) const SYS_RESOURCE: u32 = 24;

/// Whether this process has a capability in its effective set.
pub(super) fn has_capability(bit: u32) -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| has_bit(&status, bit))
}

fn has_bit(status: &str, bit: u32) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> bit & 1 == 1)
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
        assert!(has_bit(status, SYS_ADMIN));
        assert!(!has_bit(status, SYS_RESOURCE));
        assert!(!has_bit("", SYS_ADMIN));
    }
}
