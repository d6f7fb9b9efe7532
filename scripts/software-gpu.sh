#!/usr/bin/env bash
# A Vulkan device without a GPU: Mesa's software driver, installed with apt where it lacks (as root).
# Prints the variable that makes it the one driver there is:
#
#     export "$(scripts/software-gpu.sh)"
set -euo pipefail

find_driver() {
  ls /usr/share/vulkan/icd.d/lvp_icd*.json 2>/dev/null | head -n 1
}

if [ -z "$(find_driver)" ] || ! ldconfig -p | grep -q 'libvulkan\.so\.1'; then
  {
    apt-get update
    apt-get install -y --no-install-recommends libvulkan1 mesa-vulkan-drivers
  } >&2
fi
driver=$(find_driver)
if [ -z "$driver" ]; then
  echo "software-gpu: expected a driver lvp_icd*.json in /usr/share/vulkan/icd.d, found none" >&2
  exit 1
fi
echo "VK_DRIVER_FILES=$driver"
