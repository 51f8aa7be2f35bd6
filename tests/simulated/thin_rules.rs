//! The simulation has the rules of thin pools that the kernel has: `guest_thin_host` checks the same ones
//! with the kernel.

use slackwater::host::memory::MemoryHost;
use slackwater_testkit::thin_rules::Rules;

#[test]
fn the_simulation_has_the_rules_of_thin_pools() {
    let host = MemoryHost::new();
    let pool = "vg-pool";
    let rules = Rules {
        host: &host,
        pool,
        suspend_device: &|uuid| host.suspend_mapped(uuid).unwrap(),
        suspend: &|it| host.set_up_pool(pool, |setup| setup.suspended = it),
    };
    rules.check();
}
