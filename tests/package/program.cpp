// Linked with the installed library, by hand and by project/.
#include <tessera/comm/world.h>

int main() { return tessera::init().size() == 1 ? 0 : 1; }
