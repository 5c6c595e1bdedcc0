#pragma once

/// Marks a symbol as part of the public interface; everything else is hidden.
#define TESSERA_API __attribute__((visibility("default")))
